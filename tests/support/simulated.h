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

}  // namespace emend::testing
