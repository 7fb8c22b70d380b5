// Just enough of PNG to look at a screenshot: 8-bit RGB or RGBA, no interlacing.
#pragma once

#include <emend/core/atomic_file.h>
#include <zlib.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <set>
#include <stdexcept>
#include <vector>

namespace emend::testing {

struct Image {
  uint32_t width = 0, height = 0;
  std::vector<uint8_t> rgb;

  [[nodiscard]] size_t distinct_colours() const {
    std::set<uint32_t> seen;
    for (size_t i = 0; i + 2 < rgb.size(); i += 3) seen.insert(rgb[i] << 16 | rgb[i + 1] << 8 | rgb[i + 2]);
    return seen.size();
  }
  [[nodiscard]] double mean_brightness() const {
    double sum = 0;
    for (uint8_t value : rgb) sum += value;
    return rgb.empty() ? 0 : sum / static_cast<double>(rgb.size());
  }
};

inline Image read_png(const std::filesystem::path& path) {
  const std::string file = read_file(path);
  const auto word = [&](size_t at) {
    uint32_t value = 0;
    for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(file.at(at + i));
    return value;
  };
  if (file.compare(0, 8, "\x89PNG\r\n\x1a\n") != 0) throw std::runtime_error("not a PNG: " + path.string());
  Image image;
  size_t channels = 0;
  std::string packed;
  for (size_t at = 8; at + 8 <= file.size();) {
    const uint32_t size = word(at);
    const std::string kind = file.substr(at + 4, 4);
    if (kind == "IHDR") {
      image.width = word(at + 8);
      image.height = word(at + 12);
      channels = file.at(at + 17) == 6 ? 4 : 3;
    } else if (kind == "IDAT") {
      packed += file.substr(at + 8, size);
    }
    at += size + 12;
  }
  const size_t stride = image.width * channels;
  std::vector<uint8_t> raw((stride + 1) * image.height);
  uLongf length = raw.size();
  if (uncompress(raw.data(), &length, reinterpret_cast<const Bytef*>(packed.data()), packed.size()) != Z_OK ||
      length != raw.size())
    throw std::runtime_error("damaged PNG: " + path.string());
  std::vector<uint8_t> above(stride, 0), row(stride);
  for (size_t y = 0; y < image.height; ++y) {
    const uint8_t* line = raw.data() + y * (stride + 1);
    for (size_t x = 0; x < stride; ++x) {
      const int a = x >= channels ? row[x - channels] : 0, b = above[x], c = x >= channels ? above[x - channels] : 0;
      const int p = a + b - c, pa = std::abs(p - a), pb = std::abs(p - b), pc = std::abs(p - c);
      const int predicted[] = {0, a, b, (a + b) / 2, pa <= pb && pa <= pc ? a : pb <= pc ? b : c};
      row[x] = static_cast<uint8_t>(line[1 + x] + predicted[line[0] % 5]);
    }
    for (size_t x = 0; x < stride; x += channels)
      image.rgb.insert(image.rgb.end(), row.begin() + static_cast<std::ptrdiff_t>(x),
                       row.begin() + static_cast<std::ptrdiff_t>(x) + 3);
    above = row;
  }
  return image;
}

}  // namespace emend::testing
