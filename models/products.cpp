#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cpu/Utils.h>
#include <emend/devices/kernels.h>
#include <emend/devices/placement.h>
#include <emend/models/config.h>
#include <emend/models/detail/dot_products.h>
#include <emend/models/products.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <atomic>

namespace emend::models {
namespace {

std::atomic<int64_t> counted_flops{0};

// Where oneDNN is faster than MKL in float32, measured with one thread and two on weights of 0.3 to 30 million numbers.
// Below the least its set-up costs more.
constexpr int64_t kLeastWeight = int64_t{1} << 18;

bool onednn_pays(int64_t rows, const at::Tensor& weight_OI) {
  const int64_t weight = weight_OI.numel();
  return weight >= kLeastWeight || (rows >= 64 && 2 * rows * weight >= int64_t{1} << 24);
}

void count(const at::Tensor& x, const at::Tensor& weight) noexcept {
  const int64_t once = 2 * weight.numel() * (x.numel() / std::max<int64_t>(1, x.size(-1)));
  const bool grads = at::GradMode::is_enabled();
  counted_flops.fetch_add(once * (1 + (grads && x.requires_grad()) + (grads && weight.requires_grad())),
                          std::memory_order_relaxed);
}

using OneDnnLinear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                std::string_view, c10::List<std::optional<at::Scalar>>,
                                std::optional<std::string_view>);

// The operator that LibTorch's compiler uses for linear layers: one call of oneDNN's matrix product.
template <class Function>
std::optional<c10::TypedOperatorHandle<Function>> find_operator(const char* name) {
  const auto schema = c10::Dispatcher::singleton().findSchema({name, ""});
  return schema ? std::optional(schema->typed<Function>()) : std::nullopt;
}

const c10::TypedOperatorHandle<OneDnnLinear>* onednn_linear() {
  static const auto found = find_operator<OneDnnLinear>("mkldnn::_linear_pointwise");
  return found ? &*found : nullptr;
}

// oneDNN has fast code for rows without gaps, and a loop that is a hundred times slower for everything else: rows are
// put together here, weights that have gaps do not come here.
at::Tensor onednn_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return onednn_linear()->call(x.contiguous(), weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

bool without_gaps(const at::Tensor& weight) {
  return weight.is_contiguous() || weight.t().is_contiguous();
}

// Whether the product of 2 to 87 rows is computed where the weight lies: MKL on processors that are not Intel's, and
// oneDNN with AVX2 or with more than a dozen rows, put it into another order at each call. Measured with one thread and
// two on weights of 0.1 to 30 million numbers; from 88 rows on oneDNN has another kernel.
constexpr int64_t kMostInPlace = 87;
constexpr int64_t kLeastInPlace = int64_t{1} << 14;  // numbers in a weight

bool reads_in_place() noexcept {
#if defined(__x86_64__)
  static const bool reads =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && !__builtin_cpu_is("intel");
  return reads;
#else
  return false;
#endif
}

at::Tensor product_in_place(const at::Tensor& x_NI, const at::Tensor& weight_OI,
                            const std::optional<at::Tensor>& bias) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr int64_t kTogether = 48, kWorthAThread = 1 << 20;  // outputs; multiplications
  const int64_t N = x_NI.size(0), I = x_NI.size(1), O = weight_OI.size(0);
  const at::Tensor x = x_NI.contiguous(), y = at::empty({N, O}, x.options());
  const auto *rows = x.const_data_ptr<float>(), *weight = weight_OI.const_data_ptr<float>();
  auto* to = y.mutable_data_ptr<float>();
  const int64_t parts_a_thread = std::max<int64_t>(1, kWorthAThread / (N * I * kTogether));
  at::parallel_for(0, (O + kTogether - 1) / kTogether, parts_a_thread, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kTogether, count = std::min(O, end * kTogether) - first;
    detail::dot_products(weight + first * I, I, count, rows, N, I, O, to + first);
  });
  return bias ? y.add_(*bias) : y;
}

enum class Way { kLibTorch, kOneDnn, kInPlace };

Way fastest_way(const at::Tensor& x, const at::Tensor& weight) {
  if (x.dim() != 2 || weight.dim() != 2 || x.scalar_type() != at::kFloat || weight.scalar_type() != at::kFloat)
    return Way::kLibTorch;
  const int64_t rows = x.size(0);
  if (x.size(1) != weight.size(1)) return Way::kLibTorch;  // which says what is wrong
  if (reads_in_place() && rows > 1 && rows <= kMostInPlace && weight.numel() >= kLeastInPlace && weight.is_contiguous())
    return Way::kInPlace;
  return has_fast_products() && onednn_pays(rows, weight) && without_gaps(weight) ? Way::kOneDnn : Way::kLibTorch;
}

// LibTorch multiplies matrices of half precision by a loop where the processor has no instruction for them.
bool in_float32(const at::Tensor& x, const at::Tensor& weight) {
  return x.scalar_type() == weight.scalar_type() && at::isReducedFloatingType(x.scalar_type()) &&
         !multiplies_bfloat16(c10::kCPU);
}

at::Tensor without_gradient(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (in_float32(x, weight)) {
    const auto bias_in = bias ? std::optional(bias->to(at::kFloat)) : std::nullopt;
    return without_gradient(x.to(at::kFloat), weight.to(at::kFloat), bias_in).to(x.scalar_type());
  }
  switch (fastest_way(x, weight)) {
    case Way::kInPlace:
      return product_in_place(x, weight, bias);
    case Way::kOneDnn:
      return onednn_product(x, weight, bias);
    case Way::kLibTorch:
      break;
  }
  return at::linear(x, weight, bias);
}

using Reorder = at::Tensor(const at::Tensor&, std::optional<c10::SymInt>);

// The order of a weight for `_linear_pointwise`.
const c10::TypedOperatorHandle<Reorder>* onednn_order() {
  static const auto found = find_operator<Reorder>("mkldnn::_reorder_linear_weight");
  return found && onednn_linear() ? &*found : nullptr;
}

// x·Wᵀ + b by `kProduct`, and its gradient of x, g·W, too: `weight_backward` is the transpose of `weight_forward`, or
// that in an order of its own. The weight and the bias have no gradient.
template <auto kProduct>
class FrozenProduct : public torch::autograd::Function<FrozenProduct<kProduct>> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight_forward, const at::Tensor& weight_backward,
                            const std::optional<at::Tensor>& bias) {
    context->save_for_backward({weight_backward});
    return kProduct(x, weight_forward, bias);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {kProduct(gradients[0], context->get_saved_variables()[0], std::nullopt), {}, {}, {}};
  }
};

// Whether LibTorch's own way would be the slower one.
bool takes_another_way(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!devices::in_host_memory(x.device()) || weight.device() != x.device()) return false;
  if (!in_float32(x, weight) && (devices::PlainOperators::on() || fastest_way(x, weight) == Way::kLibTorch))
    return false;
  return !devices::wants_gradient(weight) && !devices::wants_gradient(bias);
}

}  // namespace

at::Tensor activate(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return at::gelu(x, "none");
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kQuickGelu:
      return x * at::sigmoid(1.702 * x);
    case Activation::kRelu:
      return at::relu(x);
    case Activation::kSilu:
      return at::silu(x);
  }
  return x;
}

at::Tensor product(const at::Tensor& x_NI, const at::Tensor& weight_OI, const at::Tensor& bias_O) {
  count(x_NI, weight_OI);
  const auto bias = bias_O.defined() ? std::optional(bias_O) : std::nullopt;
  if (!takes_another_way(x_NI, weight_OI, bias_O)) return at::linear(x_NI, weight_OI, bias);
  if (devices::wants_gradient(x_NI))
    return FrozenProduct<without_gradient>::apply(x_NI, weight_OI, weight_OI.t(), bias);
  return without_gradient(x_NI, weight_OI, bias);
}

std::shared_ptr<const PackedWeight> PackedWeight::of(const at::Tensor& weight_OI) {
  constexpr int64_t kLeastNumbers = int64_t{1} << 16;
  const bool pays = weight_OI.defined() && weight_OI.dim() == 2 && weight_OI.numel() >= kLeastNumbers &&
                    weight_OI.device().is_cpu() && weight_OI.scalar_type() == at::kBFloat16 &&
                    multiplies_bfloat16(c10::kCPU) && onednn_order() != nullptr;
  return std::shared_ptr<const PackedWeight>(pays ? new PackedWeight(weight_OI) : nullptr);
}

const at::Tensor& PackedWeight::ordered(Order& order, bool transposed) const {
  constexpr int64_t kRows = 128;  // the order serves any number of them
  std::call_once(order.once, [&] {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    order.weight = onednn_order()->call((transposed ? weight_OI_.t() : weight_OI_).contiguous(), c10::SymInt(kRows));
  });
  return order.weight;
}

at::Tensor PackedWeight::product(const at::Tensor& x_NI, const at::Tensor& bias_O) const {
  const bool gradient = devices::wants_gradient(x_NI);
  if (x_NI.dim() != 2 || x_NI.size(0) == 0 || x_NI.scalar_type() != at::kBFloat16 || devices::PlainOperators::on() ||
      devices::wants_gradient(bias_O))
    return models::product(x_NI, weight_OI_, bias_O);
  count(x_NI, weight_OI_);
  const auto bias = bias_O.defined() ? std::optional(bias_O) : std::nullopt;
  if (gradient)
    return FrozenProduct<onednn_product>::apply(x_NI, ordered(forward_, false), ordered(backward_, true), bias);
  return onednn_product(x_NI, ordered(forward_, false), bias);
}

bool has_fast_products() noexcept {
#if defined(__x86_64__)
  static const bool fast = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           !__builtin_cpu_is("intel") && onednn_linear() != nullptr;
  return fast;
#else
  return false;
#endif
}

bool multiplies_bfloat16(c10::Device device) {
  if (device.is_cuda()) return true;  // since compute capability 8.0, the oldest that LibTorch 2.11 is built for here
  static const bool cpu = [] {
    const auto capabilities = at::cpu::get_cpu_capabilities();
    const auto has = [&](const char* name) {
      const auto found = capabilities.find(name);
      return found != capabilities.end() && found->second.isBool() && found->second.toBool();
    };
    return has("avx512_bf16") || has("amx_bf16");
  }();
  return cpu;
}

int64_t linear_flops() noexcept {
  return counted_flops.load(std::memory_order_relaxed);
}

}  // namespace emend::models
