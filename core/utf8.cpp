#include <emend/core/utf8.h>

#include <algorithm>
#include <cstring>

namespace emend {

namespace {

/// Length of the well-formed sequence at the start of `bytes`, 0 if there is none.
size_t sequence_length(const unsigned char* bytes, size_t size) noexcept {
  const unsigned char lead = bytes[0];
  size_t length = 0;
  unsigned char low = 0x80, high = 0xBF;  // allowed range of the second byte
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  }
  if (length == 0 || length > size || bytes[1] < low || bytes[1] > high) return 0;
  for (size_t i = 2; i < length; ++i)
    if (bytes[i] < 0x80 || bytes[i] > 0xBF) return 0;
  return length;
}

}  // namespace

std::optional<size_t> first_invalid_utf8(std::string_view text) noexcept {
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  size_t i = 0;
  while (i < text.size()) {
    uint64_t eight = 0;  // most text is ASCII: look at eight bytes at once
    if (text.size() - i >= 8 && (std::memcpy(&eight, bytes + i, 8), (eight & 0x8080808080808080ULL) == 0)) {
      i += 8;
      continue;
    }
    const size_t length = sequence_length(bytes + i, text.size() - i);
    if (length == 0) return i;
    i += length;
  }
  return std::nullopt;
}

int64_t line_of_offset(std::string_view text, size_t offset) noexcept {
  return 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(std::min(offset, text.size())), '\n');
}

}  // namespace emend
