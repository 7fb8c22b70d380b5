#include <dlfcn.h>
#include <emend/devices/detail/nvml.h>

#include <array>

namespace emend::devices::detail {
namespace {

struct NvmlMemory {
  unsigned long long total, free, used;
};

/// The few functions in use; all null if the library is absent. Opened once and kept.
struct Nvml {
  int (*init)() = nullptr;
  int (*handle_by_bus)(const char*, void**) = nullptr;
  int (*name)(void*, char*, unsigned) = nullptr;
  int (*memory)(void*, NvmlMemory*) = nullptr;
  int (*driver_version)(char*, unsigned) = nullptr;
  int (*mig_mode)(void*, unsigned*, unsigned*) = nullptr;  // null in libraries from before there was one
  int (*bus_id)(char*, int, int) = nullptr;                // the CUDA runtime's, which knows our numbering
  bool ready = false;
};

template <class Function>
void resolve(void* library, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, symbol));
}

Nvml open_nvml() {
  Nvml nvml;
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return nvml;
  resolve(library, "nvmlInit_v2", nvml.init);
  resolve(library, "nvmlDeviceGetHandleByPciBusId_v2", nvml.handle_by_bus);
  resolve(library, "nvmlDeviceGetName", nvml.name);
  resolve(library, "nvmlDeviceGetMemoryInfo", nvml.memory);
  resolve(library, "nvmlSystemGetDriverVersion", nvml.driver_version);
  resolve(library, "nvmlDeviceGetMigMode", nvml.mig_mode);
  resolve(RTLD_DEFAULT, "cudaDeviceGetPCIBusId", nvml.bus_id);  // libtorch_cpu.so brings libcudart
  nvml.ready = nvml.init && nvml.handle_by_bus && nvml.name && nvml.memory && nvml.driver_version && nvml.bus_id &&
               nvml.init() == 0;
  return nvml;
}

}  // namespace

std::optional<GpuInfo> query_gpu(int index) {
  static const Nvml nvml = open_nvml();
  if (!nvml.ready) return std::nullopt;
  std::array<char, 32> bus{};
  std::array<char, 128> name{}, driver{};
  NvmlMemory memory{};
  void* handle = nullptr;
  if (nvml.bus_id(bus.data(), static_cast<int>(bus.size()), index) != 0) return std::nullopt;
  if (nvml.handle_by_bus(bus.data(), &handle) != 0) return std::nullopt;
  if (nvml.memory(handle, &memory) != 0) return std::nullopt;
  unsigned sliced = 0, sliced_later = 0;
  if (nvml.mig_mode && nvml.mig_mode(handle, &sliced, &sliced_later) == 0 && sliced == 1) memory = {};
  nvml.name(handle, name.data(), name.size());
  nvml.driver_version(driver.data(), driver.size());
  return GpuInfo{name.data(), bus.data(), driver.data(), static_cast<int64_t>(memory.total),
                 static_cast<int64_t>(memory.free)};
}

}  // namespace emend::devices::detail
