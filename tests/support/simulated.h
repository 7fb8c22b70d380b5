// Simulated devices for tests: sim(k) switches them on when first called.
#pragma once

#include <emend/devices/placement.h>
#include <emend/devices/simulated.h>

namespace emend::testing {

/// sim:<index>; all eight are switched on.
inline c10::Device sim(int index) {
  static const bool enabled = (devices::enable_simulated_devices(devices::kMaxSimulated), true);
  (void)enabled;
  return {devices::kSimulated, static_cast<c10::DeviceIndex>(index)};
}

/// Sets a limit of a simulated device's memory for the scope's duration.
class SimulatedLimitScope {
 public:
  SimulatedLimitScope(int index, int64_t bytes) : index_(index), before_(devices::simulated_memory_limit(index)) {
    devices::set_simulated_memory_limit(index, bytes);
  }
  ~SimulatedLimitScope() { devices::set_simulated_memory_limit(index_, before_); }
  SimulatedLimitScope(const SimulatedLimitScope&) = delete;
  SimulatedLimitScope& operator=(const SimulatedLimitScope&) = delete;

 private:
  int index_;
  int64_t before_;
};

}  // namespace emend::testing
