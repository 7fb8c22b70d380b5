// Checks of the machine: is what a run will use there, and does it work? For `emend doctor`, and at the start of runs.
#pragma once

#include <emend/devices/device_map.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

namespace emend::devices {

enum class CheckStatus { kOk, kWarning, kFailed, kSkipped };  ///< outcome of one check
/// "ok", "warning", "failed", "skipped".
[[nodiscard]] std::string_view to_string(CheckStatus status) noexcept;

/// One finding: what was looked at, how it is, and what to do if it is not well.
struct Check {
  std::string name;  ///< "cuda runtime", "copy sim:0 -> sim:1", …
  CheckStatus status = CheckStatus::kOk;
  std::string detail;
  std::string advice = {};      ///< empty when there is nothing to do
  std::string device = {};      ///< or devices, "sim:0 -> sim:1"
  double value = 0, limit = 0;  ///< how far off it is, and how far it may be
};
/// {"name": …, "status": "ok", "detail": …, "advice": …}
[[nodiscard]] nlohmann::ordered_json to_json(const Check& check);

/// Everything below for the devices that `map` may use, and if they may be GPUs the CUDA library, the driver, and which
/// GPUs CUDA_VISIBLE_DEVICES shows under which number. Never throws for a finding. Copies found to be wrong are sent
/// through host memory from now on.
[[nodiscard]] std::vector<Check> check_machine(const DeviceMapSpec& map, const MaxMemory& max_memory = {});

/// Free memory of every device; a warning below a twentieth of it.
[[nodiscard]] std::vector<Check> check_memory(const std::vector<DeviceInfo>& devices);
/// Threads that LibTorch uses, against the processors that this process may use.
[[nodiscard]] Check check_threads();

/// Copies random data between every ordered pair of different devices and compares. A pair that is wrong is a failed
/// check, and its copies go through host memory from now on. Takes milliseconds a pair.
[[nodiscard]] std::vector<Check> check_copies(const std::vector<c10::Device>& devices);

}  // namespace emend::devices
