// What this process can compute on: the CUDA runtime, opened only when it is asked for, and the memory of
// devices.
//
// One binary serves machines with and without GPUs: the programs link libtorch_cpu alone, and
// libtorch_cuda.so is opened before the first CUDA question (0.15 s), and only where there is a driver. LibTorch's own
// code asks too (a backward pass, a seed), once a process: whoever asks first hides the GPUs of a library opened later.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace emend::devices {

struct CudaRuntime {
  bool driver = false;  ///< NVIDIA's driver library is on this machine
  bool loaded = false;  ///< LibTorch's CUDA half is in this process
  int devices = 0;      ///< CUDA devices that the driver shows to this process
  std::string reason;   ///< why `devices` is 0, for people; empty otherwise
};

/// Opens libtorch_cuda.so, once, and counts the devices. Later calls return the same answer. Thread-safe;
/// never throws: a machine without GPUs is not an error until a GPU is asked for. Switches cuDNN's attention off.
const CudaRuntime& load_cuda_runtime();
/// True once load_cuda_runtime() was called, whatever came of it.
[[nodiscard]] bool cuda_runtime_was_asked() noexcept;

struct DeviceInfo {
  c10::Device device;
  std::string name;         ///< "NVIDIA H100 80GB HBM3", "AMD EPYC 9R14", "simulated"
  std::string bus;          ///< PCI bus id of a GPU, else empty
  int64_t total_bytes = 0;  ///< memory in all; 0 if it cannot be told
  int64_t free_bytes = 0;   ///< memory that could be allocated now, what LibTorch's allocator keeps unused included
};

/// The CPU, the simulated devices that are switched on, and (after load_cuda_runtime) the CUDA devices.
/// Asking puts no CUDA context on any device where NVIDIA's management library is present.
[[nodiscard]] std::vector<DeviceInfo> visible_devices();

struct MemoryStats {
  int64_t allocated = 0;  ///< bytes in tensors; for the CPU, the resident size of the process
  int64_t peak = 0;       ///< the largest `allocated` since the start or the last reset
};
/// Of "cpu" (resident and peak resident size), "sim:k" and "cuda:k" (their allocators' counts).
/// Throws Error(kDevice) if the device is not visible.
[[nodiscard]] MemoryStats device_memory_stats(c10::Device device);
/// Starts a new peak. For the CPU this needs Linux's /proc/self/clear_refs; where that is refused the peak
/// goes on.
void reset_peak_memory(c10::Device device);
/// Gives what the allocators of accelerators hold and no tensor uses back to the devices, so that the next phase of a
/// run is not served from pieces of the last one's blocks.
void release_unused_memory();

/// Whether LibTorch's error is one of a GPU, of CUDA or of a library on it, and not of what it was asked to compute.
[[nodiscard]] bool is_device_failure(const c10::Error& error);

/// Whether the driver lets `from` reach the memory of `to`; nothing if that cannot be told (or they are not GPUs).
[[nodiscard]] std::optional<bool> peer_access(c10::Device from, c10::Device to);

/// Processors that this process may use: its affinity, and what its control group grants.
[[nodiscard]] int usable_processors();

}  // namespace emend::devices
