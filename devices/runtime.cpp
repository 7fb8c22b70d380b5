#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <emend/core/text.h>
#include <emend/devices/detail/control_group.h>
#include <emend/devices/detail/nvml.h>
#include <emend/devices/detail/sim_memory.h>
#include <emend/devices/placement.h>
#include <emend/devices/runtime.h>
#include <emend/devices/simulated.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <tuple>
#include <typeinfo>

namespace emend::devices {
namespace {

std::atomic<bool> g_cuda_asked{false};

/// NVIDIA's driver library, kept open; null on a machine without one.
void* driver_library() {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return driver;
}

template <class Function>
Function* driver_function(const char* name) {
  return driver_library() ? reinterpret_cast<Function*>(dlsym(driver_library(), name)) : nullptr;
}

/// Why the driver shows no device; empty if it shows some.
std::string reason_for_no_device() {
  const auto visible = environment("CUDA_VISIBLE_DEVICES");
  if (std::getenv("CUDA_VISIBLE_DEVICES") && (visible.empty() || visible == "-1"))
    return "CUDA_VISIBLE_DEVICES=\"" + visible + "\" hides every GPU";
  if (!driver_library()) return "no NVIDIA driver: libcuda.so.1 is not on this machine";
  const auto init = driver_function<int(unsigned)>("cuInit");
  const auto error_name = driver_function<int(int, const char**)>("cuGetErrorName");
  const auto count = driver_function<int(int*)>("cuDeviceGetCount");
  int status = init ? init(0) : -1, devices = 0;
  if (status == 0) status = count ? count(&devices) : -1;
  const char* name = nullptr;
  if (status != 0 && error_name) error_name(status, &name);
  if (status != 0) return "the NVIDIA driver does not start: " + std::string(name ? name : "cuInit failed");
  if (devices > 0) return "";
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
  // cuDNN's attention plans anew for every shape, some 0.4 s each, and shapes here change at nearly every step.
  at::globalContext().setSDPUseCuDNN(false);
  CudaRuntime result;
  result.driver = driver_library() != nullptr;
  result.reason = reason_for_no_device();
  if (!result.reason.empty()) return result;
  if (!dlopen(cuda_library_path().c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    const char* error = dlerror();
    result.reason = "LibTorch's CUDA library does not load: " + std::string(error ? error : "unknown reason");
    return result;
  }
  result.loaded = true;
  try {
    const auto& hooks = at::detail::getCUDAHooks();
    if (typeid(hooks) == typeid(at::CUDAHooksInterface)) {
      result.reason =
          "LibTorch was asked for CUDA before its CUDA library was opened, and does not ask again in this process: "
          "open it first (devices::load_cuda_runtime)";
    } else {
      result.devices = hooks.deviceCount();
    }
  } catch (const c10::Error& error) {
    result.reason = error.what_without_backtrace();
  }
  if (result.devices == 0 && result.reason.empty())
    result.reason =
        "the driver shows GPUs, but LibTorch's CUDA library uses none of them: the driver is too old for it";
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

/// Containers and jobs may have less memory than the machine: the limits of their control groups count too.
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
  const auto groups = detail::control_groups();
  if (groups.memory_bytes > 0 && groups.memory_bytes < info.total_bytes) {
    info.total_bytes = groups.memory_bytes;
    info.free_bytes = std::min(info.free_bytes, groups.free_bytes);
  }
  return info;
}

/// The allocator of an accelerator; null before its first tensor.
c10::DeviceAllocator* allocator_of(c10::Device device) {
  auto* allocator = c10::getDeviceAllocator(device.type());
  return allocator->initialized() ? allocator : nullptr;
}

/// What LibTorch holds of the device for its next tensors: taken, for the driver, and free for us.
int64_t unused_bytes(c10::Device device) {
  auto* allocator = allocator_of(device);
  if (!allocator) return 0;
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = allocator->getDeviceStats(device.index());
  return std::max<int64_t>(stats.reserved_bytes[kAll].current - stats.allocated_bytes[kAll].current, 0);
}

DeviceInfo cuda_info(c10::DeviceIndex index) {
  DeviceInfo info{c10::Device(c10::kCUDA, index), "CUDA device", "", 0, 0};
  if (const auto gpu = detail::query_gpu(index)) {
    info.name = gpu->name;
    info.bus = gpu->bus;
    info.total_bytes = gpu->total_bytes;
    info.free_bytes = gpu->free_bytes + unused_bytes(info.device);
    if (info.total_bytes > 0) return info;
  }
  try {  // without the management library, or of a part of a GPU: through the runtime, at the price of a context
    const auto [free, total] = c10::getDeviceAllocator(c10::kCUDA)->getMemoryInfo(index);
    info.free_bytes = static_cast<int64_t>(free) + unused_bytes(info.device);
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
    const c10::Device device(kSimulated, index);
    const auto free = limit > 0 ? limit - detail::reserved_by_simulated(index) + unused_bytes(device)
                                : devices.front().free_bytes / simulated;
    devices.push_back({device, "simulated", "", total, std::max<int64_t>(free, 0)});
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
  auto* allocator = allocator_of(device);
  if (!allocator) return {};
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
  if (auto* allocator = allocator_of(device)) allocator->resetPeakStats(device.index());
}

void release_unused_memory() {
  for (const auto type : {c10::kCUDA, kSimulated})
    if (type == c10::kCUDA ? cuda_runtime_was_asked() && load_cuda_runtime().devices > 0 : simulated_device_count() > 0)
      if (auto* allocator = allocator_of({type, 0})) allocator->emptyCache();
}

bool is_device_failure(const c10::Error& error) {
  if (dynamic_cast<const c10::AcceleratorError*>(&error)) return true;
  const std::string_view text = error.what_without_backtrace();
  for (const char* sign : {"CUDA error", "CUDA driver", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error",
                           "CUSOLVER_STATUS", "cusolver error", "NCCL error", "NVIDIA driver"})
    if (text.find(sign) != std::string_view::npos) return true;
  return false;
}

std::optional<bool> peer_access(c10::Device from, c10::Device to) {
  const auto can = driver_function<int(int*, int, int)>("cuDeviceCanAccessPeer");
  int yes = 0;
  if (!from.is_cuda() || !to.is_cuda() || !can || can(&yes, from.index(), to.index()) != 0) return std::nullopt;
  return yes != 0;
}

int usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // A set of more than 1,024 processors does not fit.
  int count = sched_getaffinity(0, sizeof set, &set) == 0
                  ? CPU_COUNT(&set)
                  : std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  if (const double granted = detail::control_groups().processors; granted > 0)
    count = std::min(count, static_cast<int>(std::ceil(std::min(granted, 1e6))));
  return std::max(count, 1);
}

static at::Float32Precision product_precision() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
}

static void set_product_precision(at::Float32Precision precision) {
  at::globalContext().setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, precision);
}

Tf32Products::Tf32Products(bool on) : on_(on), before_(static_cast<int>(product_precision())) {
  if (on_) set_product_precision(at::Float32Precision::TF32);
}

Tf32Products::~Tf32Products() {
  if (on_) set_product_precision(static_cast<at::Float32Precision>(before_));
}

bool tf32_products() {
  return product_precision() == at::Float32Precision::TF32;
}

namespace {

// Work queued on `later` from now on waits for what is queued on `earlier`.
void order(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

c10::Stream current(const c10::Stream& stream) {
  return c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device());
}

struct ByIndex {
  bool operator()(c10::Device a, c10::Device b) const { return a.index() < b.index(); }
};

c10::Stream stream_of(c10::Device device, int lane) {
  static std::mutex mutex;
  static auto* kept = new std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, int>, c10::Stream>;
  const std::lock_guard lock(mutex);
  const auto key = std::make_tuple(device.type(), device.index(), lane);
  auto found = kept->find(key);
  if (found == kept->end())
    found = kept->emplace(key, c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)).first;
  return found->second;
}

}  // namespace

StreamSet::StreamSet(const std::vector<c10::Device>& devices, int lane) {
  for (const auto& device : std::set<c10::Device, ByIndex>(devices.begin(), devices.end())) {
    if (device.is_cpu()) continue;
    streams_.push_back(stream_of(device, lane));
    order(current(streams_.back()), streams_.back());
  }
}

StreamSet::~StreamSet() {
  for (const auto& stream : streams_) {
    try {
      order(stream, current(stream));
    } catch (const c10::Error&) {  // the GPU has failed; the next use of it says so
    }
  }
}

}  // namespace emend::devices
