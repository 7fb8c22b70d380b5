// Simulated devices "sim:0" … "sim:7": host memory behind LibTorch's PrivateUse1 key, so that a machine
// without GPUs can prove that a model split over several devices gives the same numbers.
//
// Goals: operands on different devices are refused in LibTorch's own words; bytes and peaks are counted per
// device; a limit makes a device run out of memory; every operator the CPU has works, with gradients, views
// and in-place writes; results equal the CPU's bit for bit. Non-goals: speed, and finding missing
// synchronisation (streams and events do nothing).
//
// Nothing is registered before enable_simulated_devices() is called, so unused they cost nothing.
#pragma once

#include <cstdint>

namespace emend::devices {

inline constexpr int kMaxSimulated = 8;

/// Switches on sim:0 … sim:<count-1>. May be called again to change the count; the backend itself is
/// registered once a process and stays. Call it before the first tensor of the device is made. Thread-safe.
/// Throws Error(kInvalidArgument) unless 1 <= count <= kMaxSimulated, Error(kUnsupported) if another backend
/// already took PrivateUse1 in this process.
void enable_simulated_devices(int count);
/// 0 before enable_simulated_devices.
[[nodiscard]] int simulated_device_count() noexcept;

/// From now on an allocation that would take the device past `bytes` raises c10::OutOfMemoryError; 0 means no
/// limit. Throws Error(kInvalidArgument) for an index outside 0 … kMaxSimulated-1 or negative bytes.
void set_simulated_memory_limit(int index, int64_t bytes);
[[nodiscard]] int64_t simulated_memory_limit(int index);

}  // namespace emend::devices
