// Byte sizes as people write them, and the --max-memory option.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace emend::devices {

/// "10GiB" = 10·2³⁰, "10GB" = 10·10⁹, "512MiB", "1.5TiB", "1048576" (bytes). Units: KiB MiB GiB TiB KB MB GB
/// TB, in any case except one: a decimal unit that ends in a lower-case b ("10Gb") is refused, because it
/// reads as bits, and elsewhere means bits. A unit without "B" ("10G") is refused too: it does not say which
/// of the two it is. Throws Error(kInvalidArgument) that starts with `where`.
[[nodiscard]] int64_t parse_bytes(std::string_view text, const std::string& where);
/// "1.5 GiB", "640 B": for people. Negative sizes keep their sign.
[[nodiscard]] std::string format_bytes(int64_t bytes);

/// What each device may hold. As in accelerate, a device that is not listed is not used once anything is listed.
struct MaxMemory {
  std::vector<std::pair<c10::Device, int64_t>> limits;

  [[nodiscard]] bool empty() const { return limits.empty(); }
  [[nodiscard]] std::optional<int64_t> of(c10::Device device) const;  ///< bytes, if the device has a limit
};

/// "0=10GiB,1=20GiB,cpu=30GiB". Keys are device names or bare numbers, which mean devices of type `numbered`.
/// Throws Error(kInvalidArgument) for an unknown or repeated key, a missing size, and what parse_bytes
/// refuses; Error(kUnsupported) for "disk".
[[nodiscard]] MaxMemory parse_max_memory(std::string_view text, c10::DeviceType numbered = c10::kCUDA);

}  // namespace emend::devices
