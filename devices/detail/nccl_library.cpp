#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <emend/devices/detail/nccl_library.h>
#include <emend/devices/detail/nvml.h>
#include <emend/devices/detail/plugin_file.h>
#include <emend/devices/placement.h>

#include <cstdlib>
#include <fstream>

namespace emend::devices::detail {
namespace {

constexpr char kFileName[] = "libemend_nccl.so";

/// 22809 → "2.28.9".
std::string version_text(int32_t number) {
  return std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." + std::to_string(number % 100);
}

NcclOpened find_plugin(const Log& log) {
  const char* named = std::getenv("EMEND_NCCL_PLUGIN");
  const std::string file = named ? named : "";
  if (file == "none") {
    log.debug("nccl", "EMEND_NCCL_PLUGIN=none: tensors on GPUs are summed through host memory");
    return {};
  }
  auto opened =
      open_nccl_plugin(file.empty() ? plugin_file(kFileName, reinterpret_cast<const void*>(&open_nccl_plugin)) : file);
  if (opened.plugin)
    log.debug("nccl", opened.text);
  else if (file.empty())
    log.debug("nccl", opened.text + "; tensors on GPUs are summed through host memory");
  else
    log.warning("nccl", "EMEND_NCCL_PLUGIN: " + opened.text + "; tensors on GPUs are summed through host memory");
  return opened;
}

/// The same in all containers of a machine, and in no two machines.
std::string machine_id() {
  std::ifstream in("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(in, id);
  return id;
}

}  // namespace

NcclOpened open_nccl_plugin(const std::string& file) {
  NcclOpened opened;
  opened.plugin = open_plugin<NcclPlugin>(file, "NCCL", kNcclPluginEntry, kNcclPluginAbi, opened.text);
  if (opened.plugin) opened.text = "NCCL " + version_text(opened.plugin->version()) + " through " + file;
  return opened;
}

const NcclPlugin* nccl_plugin(const Log& log) {
  static const NcclOpened opened = find_plugin(log);
  return opened.plugin;
}

int64_t nccl_gpu(const at::Tensor& tensor, const Log& log) {
  const auto device = tensor.device();
  if (!(device.is_cuda() || device.type() == kSimulated) || tensor.numel() == 0) return 0;
  const auto* plugin = nccl_plugin(log);
  if (!plugin || (plugin->memory == NcclMemory::kCuda) != device.is_cuda()) return 0;
  std::string name = device.str();
  if (device.is_cuda()) {
    const auto gpu = query_gpu(device.index());
    if (!gpu) return 0;  // two processes could not tell whether they share it
    name = gpu->bus;
  }
  return static_cast<int64_t>(std::hash<std::string>()(machine_id() + " " + name) | 1);
}

int NcclGroup::join(const std::string& id, int rank, int size) {
  const c10::DeviceGuard here(device_);
  return plugin_.create(id.data(), rank, size, &group_);
}

int NcclGroup::all_reduce_sum(at::Tensor& sum) {
  const c10::DeviceGuard here(device_);
  const auto dtype = sum.scalar_type() == at::kDouble ? NcclDtype::kFloat64 : NcclDtype::kInt64;
  return plugin_.all_reduce_sum(group_, sum.data_ptr(), sum.numel(), dtype, stream());
}

NcclState NcclGroup::poll() const {
  const c10::DeviceGuard here(device_);
  return plugin_.poll(group_, stream());
}

void* NcclGroup::stream() const {
  if (!device_.is_cuda()) return nullptr;
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).native_handle();
}

}  // namespace emend::devices::detail
