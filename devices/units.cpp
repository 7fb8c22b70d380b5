#include <emend/core/option.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/placement.h>
#include <emend/devices/units.h>

#include <array>
#include <cmath>

namespace emend::devices {
namespace {

constexpr std::string_view kExpectedSize = "a size such as 10GiB, 10GB or 512MiB";

[[noreturn]] void bad_size(const std::string& where, std::string_view text, const std::string& advice) {
  refuse({where, "\"" + std::string(text) + "\" is not a size", std::string(kExpectedSize), advice});
}

/// The factor of a unit; throws for one that is missing, unknown or ambiguous.
double factor_of(std::string_view unit, std::string_view text, const std::string& where) {
  static constexpr std::string_view kPrefixes = "kmgt";
  if (unit.empty()) return 1;
  const std::string name = lower(unit);
  if (unit == "B") return 1;
  const auto power = kPrefixes.find(name[0]);
  if (power == std::string_view::npos) bad_size(where, text, "");
  const std::string prefix(1, "KMGT"[power]);
  const auto number = std::string(text.substr(0, text.size() - unit.size()));
  if (name.size() == 3 && name.substr(1) == "ib") return std::pow(1024.0, static_cast<double>(power) + 1);
  if (name.size() == 2 && name[1] == 'b') {
    if (unit[1] == 'b')
      bad_size(where, text,
               "a lower-case b reads as bits: write " + number + prefix + "B or " + number + prefix + "iB");
    return std::pow(1000.0, static_cast<double>(power) + 1);
  }
  if (name.size() == 1 || name.substr(1) == "i")
    bad_size(where, text,
             "say which: " + number + prefix + "iB (powers of 1024) or " + number + prefix + "B (of 1000)");
  bad_size(where, text, "");
}

}  // namespace

int64_t parse_bytes(std::string_view text, const std::string& where) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !std::isfinite(number)) bad_size(where, text, "");
  if (number < 0) bad_size(where, text, "a size cannot be negative");
  const auto unit = trimmed(text.substr(static_cast<size_t>(end - text.data())), " ");
  const double bytes = number * factor_of(unit, text, where);
  if (bytes >= 9.2e18) bad_size(where, text, "that is more than any machine has");
  if (unit.empty() && bytes != std::floor(bytes)) bad_size(where, text, "a number of bytes is whole");
  return static_cast<int64_t>(bytes);
}

std::string format_bytes(int64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = std::abs(static_cast<double>(bytes));
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return formatted("%s%.*f %s", bytes < 0 ? "-" : "", unit == 0 ? 0 : 1, value, kUnits[unit]);
}

std::optional<int64_t> MaxMemory::of(c10::Device device) const {
  for (const auto& [key, bytes] : limits)
    if (key == device) return bytes;
  return std::nullopt;
}

MaxMemory parse_max_memory(std::string_view text, c10::DeviceType numbered) {
  const std::string where = setting("max_memory") + " \"" + std::string(text) + "\"";
  MaxMemory result;
  for (const std::string& item : list_items(std::string(text))) {
    const auto entry = trimmed(item, " ");
    const auto equals = entry.find('=');
    if (equals == std::string_view::npos)
      refuse({where, "the entry \"" + std::string(entry) + "\" has no \"=\"",
              "DEVICE=SIZE entries such as 0=10GiB,1=20GiB,cpu=30GiB", ""});
    const auto key = trimmed(entry.substr(0, equals), " ");
    auto device = parse_device_name(key);
    if (device.is_cuda() && !key.starts_with("cuda")) device = {numbered, device.index()};
    if (result.of(device)) refuse({where, to_string(device) + " is listed twice", "each device once", ""});
    result.limits.emplace_back(device, parse_bytes(trimmed(entry.substr(equals + 1), " "), where));
  }
  return result;
}

}  // namespace emend::devices
