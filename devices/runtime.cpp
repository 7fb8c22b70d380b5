#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <dlfcn.h>
#include <emend/core/error.h>
#include <emend/devices/detail/nvml.h>
#include <emend/devices/placement.h>
#include <emend/devices/runtime.h>
#include <emend/devices/simulated.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace emend::devices {
namespace {

std::atomic<bool> g_cuda_asked{false};

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

/// Why the driver shows no device.
std::string reason_for_no_device() {
  const auto visible = environment("CUDA_VISIBLE_DEVICES");
  if (std::getenv("CUDA_VISIBLE_DEVICES") && (visible.empty() || visible == "-1"))
    return "CUDA_VISIBLE_DEVICES=\"" + visible + "\" hides every GPU";
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!driver) return "no NVIDIA driver: libcuda.so.1 is not on this machine";
  using Init = int (*)(unsigned);
  using ErrorName = int (*)(int, const char**);
  const auto init = reinterpret_cast<Init>(dlsym(driver, "cuInit"));
  const auto error_name = reinterpret_cast<ErrorName>(dlsym(driver, "cuGetErrorName"));
  const int status = init ? init(0) : -1;
  const char* name = nullptr;
  if (status != 0 && error_name) error_name(status, &name);
  if (status != 0) return "the NVIDIA driver does not start: " + std::string(name ? name : "cuInit failed");
  return "the NVIDIA driver shows no GPU to this process" +
         (visible.empty() ? std::string() : " (CUDA_VISIBLE_DEVICES=" + visible + ")");
}

/// Beside libtorch_cpu.so if it is there, else by the loader's own search.
std::string cuda_library_path() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&at::globalContext), &info) && info.dli_fname) {
    const auto beside = std::filesystem::path(info.dli_fname).parent_path() / "libtorch_cuda.so";
    if (std::filesystem::exists(beside)) return beside;
  }
  return "libtorch_cuda.so";
}

CudaRuntime open_cuda() {
  CudaRuntime result;
  if (!dlopen(cuda_library_path().c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    const char* error = dlerror();
    result.reason = "LibTorch's CUDA library does not load: " + std::string(error ? error : "unknown reason");
    return result;
  }
  result.loaded = true;
  try {
    result.devices = at::detail::getCUDAHooks().deviceCount();
  } catch (const c10::Error& error) {
    result.reason = error.what_without_backtrace();
  }
  if (result.devices == 0 && result.reason.empty()) result.reason = reason_for_no_device();
  return result;
}

/// A field of /proc/<file> in kB, as bytes; 0 if absent.
int64_t proc_bytes(const char* file, const std::string& field) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(field + ":")) continue;
    std::istringstream rest(line.substr(field.size() + 1));
    int64_t kilobytes = 0;
    rest >> kilobytes;
    return kilobytes * 1024;
  }
  return 0;
}

/// A number in a control group's file; -1 for "max" or no such file.
int64_t cgroup_number(const char* file) {
  std::ifstream in(file);
  int64_t value = -1;
  return in >> value ? value : -1;
}

/// Containers may have less memory than the machine: the control group's limit counts too.
DeviceInfo cpu_info() {
  DeviceInfo info{c10::Device(c10::kCPU), "CPU", "", 0, 0};
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name")) {
      info.name = line.substr(std::min(line.find(": ") + 2, line.size()));
      break;
    }
  info.total_bytes = proc_bytes("/proc/meminfo", "MemTotal");
  info.free_bytes = proc_bytes("/proc/meminfo", "MemAvailable");
  const int64_t limit = cgroup_number("/sys/fs/cgroup/memory.max");
  if (limit > 0 && limit < info.total_bytes) {
    info.total_bytes = limit;
    const int64_t used = std::max<int64_t>(cgroup_number("/sys/fs/cgroup/memory.current"), 0);
    info.free_bytes = std::min(info.free_bytes, std::max<int64_t>(limit - used, 0));
  }
  return info;
}

DeviceInfo cuda_info(c10::DeviceIndex index) {
  DeviceInfo info{c10::Device(c10::kCUDA, index), "CUDA device", "", 0, 0};
  if (const auto gpu = detail::query_gpu(index)) {
    info.name = gpu->name;
    info.bus = gpu->bus;
    info.total_bytes = gpu->total_bytes;
    info.free_bytes = gpu->free_bytes;
    return info;
  }
  try {  // without the management library: through the runtime, at the price of a context
    const auto [free, total] = c10::getDeviceAllocator(c10::kCUDA)->getMemoryInfo(index);
    info.free_bytes = static_cast<int64_t>(free);
    info.total_bytes = static_cast<int64_t>(total);
  } catch (const c10::Error&) {
    info.name += " (memory unknown)";
  }
  return info;
}

}  // namespace

const CudaRuntime& load_cuda_runtime() {
  static const CudaRuntime runtime = [] {
    g_cuda_asked = true;
    return open_cuda();
  }();
  return runtime;
}

bool cuda_runtime_was_asked() noexcept {
  return g_cuda_asked;
}

std::vector<DeviceInfo> visible_devices() {
  std::vector<DeviceInfo> devices{cpu_info()};
  const int simulated = simulated_device_count();
  for (int k = 0; k < simulated; ++k) {
    // Without a limit the simulated devices share the host's memory.
    const auto index = static_cast<c10::DeviceIndex>(k);
    const auto limit = simulated_memory_limit(k);
    const auto total = limit > 0 ? limit : devices.front().total_bytes / simulated;
    const auto free =
        limit > 0 ? limit - device_memory_stats({kSimulated, index}).allocated : devices.front().free_bytes / simulated;
    devices.push_back({c10::Device(kSimulated, index), "simulated", "", total, std::max<int64_t>(free, 0)});
  }
  if (cuda_runtime_was_asked())
    for (int k = 0; k < load_cuda_runtime().devices; ++k)
      devices.push_back(cuda_info(static_cast<c10::DeviceIndex>(k)));
  return devices;
}

MemoryStats device_memory_stats(c10::Device device) {
  if (device.is_cpu()) return {proc_bytes("/proc/self/status", "VmRSS"), proc_bytes("/proc/self/status", "VmHWM")};
  if (device.is_cuda() ? device.index() >= load_cuda_runtime().devices : device.index() >= simulated_device_count())
    require_visible(device, "memory statistics");
  auto* allocator = c10::getDeviceAllocator(device.type());
  if (!allocator->initialized()) return {};
  const auto stats = allocator->getDeviceStats(device.index());
  const auto& bytes = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return {bytes.current, bytes.peak};
}

void reset_peak_memory(c10::Device device) {
  if (device.is_cpu()) {
    std::ofstream("/proc/self/clear_refs") << "5";
    return;
  }
  require_visible(device, "memory statistics");
  auto* allocator = c10::getDeviceAllocator(device.type());
  if (allocator->initialized()) allocator->resetPeakStats(device.index());
}

}  // namespace emend::devices
