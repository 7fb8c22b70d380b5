// What this process can compute on: the CUDA runtime, opened only when it is asked for, and the memory of devices.
//
// One binary serves machines with and without GPUs: the programs link libtorch_cpu alone, and
// libtorch_cuda.so is opened before the first CUDA question (0.15 s), and only where there is a driver. LibTorch's own
// code asks too (a backward pass, a seed), once a process: whoever asks first hides the GPUs of a library opened later.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
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
/// Asking puts no CUDA context on any device where NVIDIA's management library is present, but on slices of GPUs (MIG).
[[nodiscard]] std::vector<DeviceInfo> visible_devices();

struct MemoryStats {
  int64_t allocated = 0;  ///< bytes in tensors; for the CPU, the resident size of the process
  int64_t peak = 0;       ///< the largest `allocated` since the start or the last reset
};
/// Of "cpu" (resident and peak resident size), "sim:k" and "cuda:k" (their allocators' counts).
/// Throws Error(kDevice) if the device is not visible.
[[nodiscard]] MemoryStats device_memory_stats(c10::Device device);
/// Starts a new peak. For the CPU this needs Linux's /proc/self/clear_refs; where that is refused the peak goes on.
void reset_peak_memory(c10::Device device);
/// Gives what the allocators of accelerators hold and no tensor uses back to the devices, so that the next phase of a
/// run is not served from pieces of the last one's blocks.
void release_unused_memory();

/// Whether LibTorch's error is one of a GPU, of CUDA or of a library on it, and not of what it was asked to compute.
[[nodiscard]] bool is_device_failure(const c10::Error& error);

/// Whether the driver lets `from` reach the memory of `to`; nothing if that cannot be told (or they are not GPUs).
[[nodiscard]] std::optional<bool> peer_access(c10::Device from, c10::Device to);

/// CUDA's products of float32 matrices in TF32 (factors rounded to 11 bits, sums in float32): on while it lives, if
/// `on`; scopes nest. LibTorch keeps this setting for the whole process.
class Tf32Products {
 public:
  explicit Tf32Products(bool on);
  ~Tf32Products();
  Tf32Products(const Tf32Products&) = delete;
  Tf32Products& operator=(const Tf32Products&) = delete;

 private:
  bool on_;
  int before_;
};
/// Whether it is on: what was computed then is not what is computed else.
[[nodiscard]] bool tf32_products();

/// Streams of their own for work that should overlap with other work on the same GPUs. A GPU runs what is queued on one
/// stream in order. Where a model is split over GPUs, one batch keeps one GPU busy at a time; several batches keep all
/// of them busy, if each has streams of its own. Devices without streams (the CPU, simulated devices) finish every
/// operator before it returns, and a set for them is empty.
///
/// A stream for every GPU among `devices`: that of lane number `lane`, which lives as long as the process, because
/// memory blocks and cuBLAS workspaces belong to the stream that first used them and would pile up with new ones. They
/// begin after what is queued on the current streams now; what is queued on the then current streams after the set's
/// end waits for them, so that weights may be changed. One lane alone needs none of them: it uses the current streams.
/// Use: `const c10::MultiStreamGuard guard(set.streams());`
class StreamSet {
 public:
  StreamSet(const std::vector<c10::Device>& devices, int lane);
  ~StreamSet();
  StreamSet(StreamSet&&) noexcept = default;
  StreamSet(const StreamSet&) = delete;
  StreamSet& operator=(const StreamSet&) = delete;
  StreamSet& operator=(StreamSet&&) = delete;

  [[nodiscard]] const std::vector<c10::Stream>& streams() const noexcept { return streams_; }

 private:
  std::vector<c10::Stream> streams_;
};

/// Processors that this process may use: its affinity, and what its control group grants.
[[nodiscard]] int usable_processors();

}  // namespace emend::devices
