// Memory of the simulated devices: who holds how many bytes, limits, and the c10 allocator over host memory.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace emend::devices::detail {

/// While on, freed bytes stay with the device for later tensors, as CUDA's allocator keeps blocks; off drops them.
void keep_simulated_blocks(bool on);
/// Bytes in tensors and kept.
[[nodiscard]] int64_t reserved_by_simulated(c10::DeviceIndex device);

[[nodiscard]] c10::DeviceIndex current_simulated_device() noexcept;
void set_current_simulated_device(c10::DeviceIndex device) noexcept;

/// Allocates on the current simulated device. Past a limit it throws c10::OutOfMemoryError, with nothing changed.
[[nodiscard]] c10::DeviceAllocator& simulated_allocator();

/// A CPU storage over the bytes of a simulated one, which it keeps alive. Nothing is copied.
[[nodiscard]] c10::Storage host_alias(const c10::Storage& simulated);
/// A simulated storage over the bytes of a CPU one, which it keeps alive and which is charged to `device`.
[[nodiscard]] c10::Storage adopt_host_storage(const c10::Storage& host, c10::DeviceIndex device);

}  // namespace emend::devices::detail
