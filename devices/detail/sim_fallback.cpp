// The boxed fallback of the simulated devices: every operator that has no kernel of its own comes through here.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <emend/core/mapped.h>
#include <emend/devices/detail/sim_backend.h>
#include <emend/devices/detail/sim_memory.h>
#include <emend/devices/placement.h>

#include <array>
#include <atomic>
#include <unordered_map>

namespace emend::devices::detail {
namespace {

using at::Tensor;
using c10::Device;
using c10::IValue;
using OptionalTensors = c10::List<std::optional<Tensor>>;

std::atomic<int64_t> g_launches{0}, g_host_reads{0}, g_uploads{0}, g_waits{0};

Tensor with_shape_of(Tensor tensor, const Tensor& other) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  if (other.is_conj()) impl->_set_conj(true);
  if (other.is_neg()) impl->_set_neg(true);
  return tensor;
}

bool is_simulated(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSimulated;
}

/// What the fallback must know about an operator, read once from its schema.
struct OperatorInfo {
  enum class Kind : uint8_t { kTensor, kTensors, kOptionalTensors, kDevice, kGenerator };
  std::vector<std::pair<size_t, Kind>> arguments;  ///< only those that matter here
  size_t n_arguments = 0, n_returns = 0;
  bool host_indices = false;    ///< index tensors may be on the CPU, as on CUDA
  bool strict_scalars = false;  ///< even a tensor without dimensions must be on the device
  bool view = false;            ///< only looks at its operand
  bool read = false;            ///< the host waits for what it finds
};

template <size_t N>
bool contains(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

std::optional<OperatorInfo::Kind> kind_of(const c10::Argument& argument) {
  using Kind = OperatorInfo::Kind;
  auto type = argument.type();
  if (const auto* optional = type->castRaw<c10::OptionalType>()) type = optional->getElementType();
  if (const auto* list = type->castRaw<c10::ListType>()) {
    const auto element = list->getElementType();
    if (element->kind() == c10::TypeKind::TensorType) return Kind::kTensors;
    const auto* optional = element->castRaw<c10::OptionalType>();
    if (optional && optional->getElementType()->kind() == c10::TypeKind::TensorType) return Kind::kOptionalTensors;
    return std::nullopt;
  }
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return Kind::kTensor;
    case c10::TypeKind::DeviceObjType:
      return Kind::kDevice;
    case c10::TypeKind::GeneratorType:
      return Kind::kGenerator;
    default:
      return std::nullopt;
  }
}

OperatorInfo read_schema(const c10::FunctionSchema& schema) {
  static constexpr std::array<std::string_view, 6> kHostIndices = {
      "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"};
  // Not elementwise: on CUDA these refuse even a scalar from the CPU.
  static constexpr std::array<std::string_view, 13> kStrictScalars = {
      "index_select", "gather",     "scatter",     "scatter_", "scatter_add", "scatter_add_",    "index_add",
      "index_add_",   "index_copy", "index_copy_", "take",     "embedding",   "nll_loss_forward"};
  OperatorInfo info;
  std::string_view name = schema.name();
  name.remove_prefix(name.find("::") + 2);
  info.n_arguments = schema.arguments().size();
  info.n_returns = schema.returns().size();
  for (size_t i = 0; i < info.n_arguments; ++i)
    if (const auto kind = kind_of(schema.arguments()[i])) info.arguments.emplace_back(i, *kind);
  static constexpr std::array<std::string_view, 4> kReads = {"_local_scalar_dense", "equal", "nonzero",
                                                             "masked_select"};
  info.read = contains(kReads, name);
  for (const auto& result : schema.returns())
    info.view = info.view || (result.alias_info() && !result.alias_info()->isWrite());
  info.host_indices = contains(kHostIndices, name);
  info.strict_scalars = contains(kStrictScalars, name);
  return info;
}

const OperatorInfo& info_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, OperatorInfo> known;
  const auto* schema = &op.schema();
  const auto found = known.find(schema);
  return found != known.end() ? found->second : known.emplace(schema, read_schema(*schema)).first->second;
}

/// One run of one operator.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), info_(info_of(op)), stack_(stack), base_(stack.size() - info_.n_arguments) {}

  void run() {
    if (!info_.view) ++(info_.read ? g_host_reads : g_launches);
    check_devices();
    convert_arguments();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    write_back();
    for (size_t i = stack_.size() - info_.n_returns; i < stack_.size(); ++i) wrap_result(stack_[i]);
  }

 private:
  using Kind = OperatorInfo::Kind;
  struct Pair {
    Tensor simulated, host;
  };

  [[noreturn]] void refuse_mix(Device first, Device other, const std::string& argument) const {
    const auto& name = op_.schema().name();
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ", argument, " is on ", to_string(other),
                ", different from other tensors on ", to_string(first),
                " (when checking argument in method wrapper_sim_", name.substr(name.find("::") + 2), ")");
  }

  void see(const Tensor& tensor, size_t argument, bool may_be_host) {
    if (!tensor.defined()) return;
    const auto device = tensor.device();
    if (device.type() == kSimulated) {
      if (!device_)
        device_ = device;
      else if (*device_ != device)
        refuse_mix(*device_, device, op_.schema().arguments()[argument].name());
    } else if (!may_be_host && !foreign_ && (tensor.dim() != 0 || info_.strict_scalars)) {
      foreign_ = {device, argument};
    }
  }

  /// Finds the one device of all operands, or raises.
  void check_devices() {
    std::optional<Device> wanted;
    for (const auto& [i, kind] : info_.arguments) {
      IValue& value = stack_[base_ + i];
      if (value.isNone()) continue;
      if (kind == Kind::kTensor) {
        see(value.toTensor(), i, false);
      } else if (kind == Kind::kTensors) {
        for (const Tensor& tensor : value.toTensorList()) see(tensor, i, false);
      } else if (kind == Kind::kOptionalTensors) {
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
          if (tensor) see(*tensor, i, info_.host_indices);
      } else if (kind == Kind::kDevice) {
        wanted = value.toDevice();
        value = IValue(Device(c10::kCPU));
      }
    }
    if (!device_ && wanted) device_ = wanted->has_index() ? *wanted : Device(kSimulated, current_simulated_device());
    if (foreign_ && device_) refuse_mix(*device_, foreign_->first, op_.schema().arguments()[foreign_->second].name());
    if (!device_) device_ = Device(kSimulated, current_simulated_device());
    const c10::DeviceGuard exists(*device_);
  }

  Tensor host_of(const Tensor& tensor) {
    if (!is_simulated(tensor)) return tensor;
    for (const auto& pair : pairs_)
      if (pair.simulated.is_same(tensor)) return pair.host;
    pairs_.push_back({tensor, host_view(tensor)});
    return pairs_.back().host;
  }

  void convert_arguments() {
    for (const auto& [i, kind] : info_.arguments) {
      IValue& value = stack_[base_ + i];
      if (kind == Kind::kGenerator) {
        value = IValue(
            host_generator(value.isNone() ? default_simulated_generator(device_->index()) : value.toGenerator()));
      } else if (value.isNone() || kind == Kind::kDevice) {
        continue;
      } else if (kind == Kind::kTensor) {
        value = IValue(host_of(value.toTensor()));
      } else if (kind == Kind::kTensors) {
        auto hosts = mapped(value.toTensorList(), [&](const Tensor& tensor) { return host_of(tensor); });
        value = IValue(std::move(hosts));
      } else {
        OptionalTensors hosts;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
          hosts.push_back(tensor ? std::optional<Tensor>(host_of(*tensor)) : std::nullopt);
        value = IValue(std::move(hosts));
      }
    }
  }

  /// Operands that the kernel resized (out=) pass their new storage and shape on to the simulated tensor.
  void write_back() {
    for (auto& [simulated, host] : pairs_) {
      const auto& host_storage = host.storage();
      auto* storage = simulated.storage().unsafeGetStorageImpl();
      if (host_storage.data() != storage->data() || host_storage.nbytes() != storage->nbytes()) {
        auto adopted = adopt_host_storage(host_storage, simulated.device().index());
        storage->set_data_ptr_noswap(std::move(adopted.unsafeGetStorageImpl()->mutable_data_ptr()));
        storage->set_nbytes(host_storage.nbytes());
      }
      if (host.sizes() != simulated.sizes() || host.strides() != simulated.strides() ||
          host.storage_offset() != simulated.storage_offset())
        simulated.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  Tensor simulated_of(const Tensor& host) {
    if (!host.defined() || is_simulated(host)) return host;
    TORCH_CHECK_NOT_IMPLEMENTED(host.layout() == c10::kStrided, "simulated devices hold strided tensors only, and ",
                                op_.schema().name(), " makes a ", host.layout(), " one");
    for (const auto& pair : pairs_)
      if (pair.host.is_same(host)) return pair.simulated;
    for (const auto& pair : pairs_) {
      if (pair.host.storage().unsafeGetStorageImpl() != host.storage().unsafeGetStorageImpl()) continue;
      const auto keys =
          pair.simulated.key_set() - c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
      return with_shape_of(at::detail::make_tensor<c10::TensorImpl>(
                               c10::TensorImpl::VIEW, c10::Storage(pair.simulated.storage()), keys, host.dtype()),
                           host);
    }
    return with_shape_of(at::detail::make_tensor<c10::TensorImpl>(
                             new_storage(host), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype()),
                         host);
  }

  c10::Storage new_storage(const Tensor& host) {
    auto* key = host.storage().unsafeGetStorageImpl();
    for (const auto& [made_from, storage] : made_)
      if (made_from == key) return storage;
    made_.emplace_back(key, adopt_host_storage(host.storage(), device_->index()));
    return made_.back().second;
  }

  void wrap_result(IValue& value) {
    if (value.isTensor()) {
      value = IValue(simulated_of(value.toTensor()));
    } else if (value.isTensorList()) {
      auto tensors = mapped(value.toTensorList(), [&](const Tensor& tensor) { return simulated_of(tensor); });
      value = IValue(std::move(tensors));
    }
  }

  const c10::OperatorHandle& op_;
  const OperatorInfo& info_;
  torch::jit::Stack& stack_;
  const size_t base_;
  std::optional<Device> device_;
  std::optional<std::pair<Device, size_t>> foreign_;
  c10::SmallVector<Pair, 8> pairs_;
  c10::SmallVector<std::pair<c10::StorageImpl*, c10::Storage>, 4> made_;
};

}  // namespace

at::Tensor host_view(const at::Tensor& simulated) {
  if (!is_simulated(simulated)) return simulated;
  auto host =
      with_shape_of(at::detail::make_tensor<c10::TensorImpl>(
                        host_alias(simulated.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), simulated.dtype()),
                    simulated);
  if (simulated.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
  return host;
}

SimulatedCounts simulated_counts() noexcept {
  return {g_launches, g_host_reads, g_uploads, g_waits};
}

void count_simulated_copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) noexcept {
  const bool up = !is_simulated(from);
  ++(!is_simulated(to) ? g_host_reads : up ? g_uploads : g_launches);
  if (up && !non_blocking) ++g_waits;
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  HostCall(op, *stack).run();
}

}  // namespace emend::devices::detail
