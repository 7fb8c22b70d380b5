// The few operators of the simulated devices that are written by hand.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/DeviceGuard.h>
#include <emend/devices/detail/sim_backend.h>
#include <emend/devices/detail/sim_memory.h>
#include <emend/devices/placement.h>
#include <torch/library.h>

#include <atomic>
#include <set>

namespace emend::devices::detail {
namespace {

using at::Tensor;
using c10::Device;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void require_strided(std::optional<c10::Layout> layout) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::kStrided,
                              "simulated devices hold strided tensors only");
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  require_strided(layout);
  const c10::OptionalDeviceGuard current(device);
  return at::detail::empty_generic(size, &simulated_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<c10::Layout> layout, std::optional<Device> device, std::optional<bool>) {
  require_strided(layout);
  const c10::OptionalDeviceGuard current(device);
  return at::detail::empty_strided_generic(size, stride, &simulated_allocator(), kKeys, c10::dtype_or_default(dtype));
}

std::atomic<int> g_broken_from{-1}, g_broken_to{-1};

void damage_if_broken(const Tensor& from, const Tensor& to) {
  const int source = g_broken_from.load(std::memory_order_relaxed);
  if (source < 0 || from.device() != Device(kSimulated, static_cast<c10::DeviceIndex>(source)) ||
      to.device() != Device(kSimulated, static_cast<c10::DeviceIndex>(g_broken_to.load())) || !to.is_contiguous())
    return;
  auto* bytes = static_cast<uint8_t*>(to.data_ptr());
  for (size_t i = 500; i < to.nbytes(); i += 1000) bytes[i] ^= 0x10;
}

/// The engine of every transfer: between devices, and to and from the host.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  count_simulated_copy(from, to, non_blocking);
  host_view(to).copy_(host_view(from));
  damage_if_broken(from, to);
  return to;
}

const Tensor& resize_in_place(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard current(self.device());
  return at::native::resize_(self, size, format);
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  resize_in_place(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

Tensor& set_strided(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(storage.device() == self.device(),
              "Expected all tensors to be on the same device: set_ got a storage on ", to_string(storage.device()),
              " for a tensor on ", to_string(self.device()));
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage) {
  const auto n = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_strided(self, std::move(storage), 0, {n}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_strided(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

/// The fused attention kernels that the CPU would choose, so that both take the same path.
int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const std::optional<Tensor> host_mask = mask ? std::optional<Tensor>(host_view(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(host_view(query), host_view(key), host_view(value), host_mask, dropout, is_causal, scale,
                               enable_gqa);
}

}  // namespace

void break_simulated_copies(c10::DeviceIndex from, c10::DeviceIndex to) {
  g_broken_to = to;
  g_broken_from = from;
}

void register_simulated_operators() {
  // Never destroyed: tensors and the dispatcher outlive every static.
  static auto* fallback =
      new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  fallback->fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  static auto* aten =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  std::set<std::string> by_hand;
  const auto write = [&](const std::string& name, auto* function) {
    aten->impl(name.c_str(), function);
    by_hand.insert("aten::" + name);
  };
  write("empty.memory_format", empty);
  write("empty_strided", empty_strided);
  write("_copy_from", copy_from);
  write("_copy_from_and_resize", copy_from_and_resize);
  write("resize_", resize_in_place);
  write("set_.source_Storage_storage_offset", set_strided);
  write("set_.source_Storage", set_storage);
  write("set_.source_Tensor", set_tensor);
  // Every other operator that has a CPU kernel goes to that kernel. Without this, those that also have a composite
  // kernel (layer_norm, structured operators) would take another path than on the CPU and differ in the last bits.
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNamesForDispatchKey(c10::DispatchKey::CPU)) {
    const std::string name = c10::toString(op);
    if (name.starts_with("aten::") && !by_hand.contains(name))
      aten->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&attention_choice);
}

}  // namespace emend::devices::detail
