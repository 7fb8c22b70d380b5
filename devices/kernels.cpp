#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <emend/core/error.h>
#include <emend/devices/detail/plugin_file.h>
#include <emend/devices/kernels.h>
#include <emend/devices/placement.h>
#include <emend/devices/plugins/kernel_plugin.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

// kernels.cu, compiled for the host (CMakeLists.txt).
extern "C" {
const emend::devices::KernelPlugin* emend_host_kernels();
#if defined(__x86_64__)
const emend::devices::KernelPlugin* emend_host_kernels_avx2();
const emend::devices::KernelPlugin* emend_host_kernels_avx512();
#endif
}

namespace emend::devices {
namespace {

constexpr char kKernelLibrary[] = "libemend_cuda.so";
constexpr char kVariable[] = "EMEND_CUDA_PLUGIN";

const KernelPlugin* asked_for() {
  const char* named = std::getenv(kVariable);
  const std::string file = named ? named : "";
  if (file.empty() || file == "none") return nullptr;
  std::string text;
  const auto* plugin = open_kernel_plugin(file, text);
  if (!plugin)
    throw Error(ErrorClass::kDevice, {std::string(kVariable) + "=" + file, text, "the kernels of this version",
                                      "build them with -DEMEND_WITH_CUDA=ON, or unset the variable"});
  return plugin;
}

struct InUse {
  std::atomic<const KernelPlugin*> cuda = nullptr, host = host_kernels().back();

  InUse() {
    if (const auto* asked = asked_for()) of(asked->memory) = asked;  // for the host a stand-in, in tests
  }
  std::atomic<const KernelPlugin*>& of(KernelMemory memory) { return memory == KernelMemory::kCuda ? cuda : host; }
};
InUse& in_use() {
  static InUse kernels;
  return kernels;
}

const KernelPlugin* kernels_of(c10::Device device) {
  if (device.is_cuda()) return in_use().cuda.load(std::memory_order_relaxed);
  return in_host_memory(device) ? in_use().host.load(std::memory_order_relaxed) : nullptr;
}

thread_local bool plain_operators = false;

KernelDtype dtype_of(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat ? KernelDtype::kFloat32 : KernelDtype::kBFloat16;
}

constexpr int64_t kNumbersAThread = 1 << 15;  // what pays waking another thread

/// Starts a work of `rows` rows: on a GPU behind what is queued on the current stream, on the host shared by threads.
template <class Kernel, class Work>
void start(const at::Tensor& like, int64_t rows, Kernel KernelPlugin::*kernel, const Work& work) {
  const auto device = like.device();
  const auto* plugin = kernels_of(device);
  EMEND_CHECK(plugin, "own_kernels() was asked");
  const auto run = [&](const KernelPlace& place) {
    if constexpr (std::is_invocable_v<Kernel, const Work&, const KernelPlace&>)
      return (plugin->*kernel)(work, place);
    else
      return (plugin->*kernel)(work, dtype_of(like), place);
  };
  if (!device.is_cuda()) {
    const int64_t numbers_a_row = std::max<int64_t>(1, like.numel() / std::max<int64_t>(1, rows));
    at::parallel_for(0, rows, std::max<int64_t>(1, kNumbersAThread / numbers_a_row),
                     [&](int64_t begin, int64_t end) { run(KernelPlace{.first_row = begin, .end_row = end}); });
    return;
  }
  const c10::DeviceGuard guard(device);
  const KernelPlace place{device.index(), c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle()};
  if (run(place) != 0)
    throw Error(ErrorClass::kDevice, {"a kernel of emend on " + to_string(device), plugin->last_error(),
                                      "a kernel that runs", std::string("unset ") + kVariable + " to do without"});
}

// What a kernel reads and writes; null where there is none.
template <class T = void>
const T* in(const at::Tensor& x) {
  return static_cast<const T*>(x.defined() ? x.const_data_ptr() : nullptr);
}
template <class T = void>
T* out(const at::Tensor& x) {
  return static_cast<T*>(x.defined() ? x.data_ptr() : nullptr);
}
at::Tensor dense(const at::Tensor& x) {
  return x.defined() ? x.contiguous() : x;
}

template <class Work, class... Parts>
Work made_of(Parts... parts) {
  return Work{parts...};
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Normed {
  at::Tensor sum, normed, inverse;
};
Normed normalise(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight, double epsilon,
                 bool one_plus) {
  const at::Tensor rows = dense(x), more = dense(added), w = dense(weight);
  const int64_t width = x.size(-1), count = x.numel() / width;
  const Normed made{added.defined() ? at::empty_like(rows) : rows, at::empty_like(rows),
                    at::empty({count}, x.options().dtype(at::kFloat))};
  void* const sum = added.defined() ? out(made.sum) : nullptr;
  const auto work = made_of<AddRmsNorm>(in(rows), in(more), in(w), sum, out(made.normed), out<float>(made.inverse),
                                        count, width, static_cast<float>(epsilon), one_plus);
  start(x, count, &KernelPlugin::add_rms_norm, work);
  return made;
}

// Results: normed, and the sum where something is added.
class NormFunction : public torch::autograd::Function<NormFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const std::optional<at::Tensor>& added,
                               const at::Tensor& weight, double epsilon, bool one_plus) {
    const Normed made = normalise(x, added.value_or(at::Tensor()), weight, epsilon, one_plus);
    context->set_materialize_grads(false);
    context->save_for_backward({made.sum, weight, made.inverse});
    context->saved_data["one_plus"] = one_plus;
    return added ? variable_list{made.normed, made.sum} : variable_list{made.normed};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &sum = saved[0], &inverse = saved[2];
    const at::Tensor normed = dense(gradients[0]), more = gradients.size() > 1 ? dense(gradients[1]) : at::Tensor();
    at::Tensor grad = more;
    if (normed.defined()) {
      const at::Tensor weight = dense(saved[1]);
      grad = at::empty_like(sum);
      const auto work =
          made_of<AddRmsNormBack>(in(sum), in(weight), in(normed), in(more), in<float>(inverse), out(grad),
                                  inverse.numel(), sum.size(-1), context->saved_data["one_plus"].toBool());
      start(sum, inverse.numel(), &KernelPlugin::add_rms_norm_back, work);
    }
    return {grad, gradients.size() > 1 ? grad : at::Tensor(), {}, {}, {}};
  }
};

// Without gaps in the last dimension.
at::Tensor with_dense_rows(const at::Tensor& x) {
  return x.stride(-1) == 1 ? x : x.contiguous();
}

/// x [N,heads,d] to rows of their own.
HeadPart plain_part(const at::Tensor& x, at::Tensor& to, bool rotated) {
  return {x.const_data_ptr(), to.data_ptr(), x.size(1), x.stride(0), x.stride(1),
          to.stride(0),       to.stride(1),  0,         rotated,     false};
}

RotateHeads tables_of(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool interleaved, bool back) {
  RotateHeads work{};
  work.cos = cos.const_data_ptr(), work.sin = sin.const_data_ptr();
  work.tokens = x.size(0), work.size = x.size(2), work.turned = cos.size(-1);
  work.interleaved = interleaved, work.back = back;
  return work;
}

at::Tensor rotated(const at::Tensor& x_Nhd, const at::Tensor& cos, const at::Tensor& sin, bool interleaved, bool back) {
  const at::Tensor x = with_dense_rows(x_Nhd);
  at::Tensor y = at::empty(x.sizes(), x.options());
  RotateHeads work = tables_of(x, cos, sin, interleaved, back);
  work.parts[0] = plain_part(x, y, true);
  work.n_parts = 1;
  start(x, work.tokens, &KernelPlugin::rotate_heads, work);
  return y;
}

at::Tensor gate_opened(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& key) {
  const auto work =
      made_of<Gated>(in(gate), in(up), out(key), gate.size(0), gate.size(1), gate.stride(0), up.stride(0));
  start(key, work.rows, &KernelPlugin::gated, work);
  return key;
}

class GateFunction : public torch::autograd::Function<GateFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    context->save_for_backward({gate, up});
    return gate_opened(gate, up, at::empty(gate.sizes(), gate.options()));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1];
    const at::Tensor grad = dense(gradients[0]), to_gate = at::empty_like(grad), to_up = at::empty_like(grad);
    const auto work = made_of<GatedBack>(in(gate), in(up), in(grad), out(to_gate), out(to_up), gate.size(0),
                                         gate.size(1), gate.stride(0), up.stride(0));
    start(grad, work.rows, &KernelPlugin::gated_back, work);
    return {to_gate, to_up};
  }
};

class RotateFunction : public torch::autograd::Function<RotateFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                            bool interleaved) {
    context->save_for_backward({cos, sin});
    context->saved_data["interleaved"] = interleaved;
    return rotated(x, cos, sin, interleaved, /*back=*/false);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {rotated(gradients[0], saved[0], saved[1], context->saved_data["interleaved"].toBool(), /*back=*/true),
            {},
            {},
            {}};
  }
};

}  // namespace

const KernelPlugin* open_kernel_plugin(const std::string& file, std::string& text) {
  const auto path =
      file == "on" ? detail::plugin_file(kKernelLibrary, reinterpret_cast<const void*>(&open_kernel_plugin)) : file;
  const auto* plugin = detail::open_plugin<KernelPlugin>(path, "kernels", kKernelPluginEntry, kKernelPluginAbi, text);
  if (plugin) text = "kernels of " + path;
  return plugin;
}

std::vector<const KernelPlugin*> host_kernels() {
  std::vector<const KernelPlugin*> sets = {emend_host_kernels()};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets.push_back(emend_host_kernels_avx2());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
    sets.push_back(emend_host_kernels_avx512());
#endif
  return sets;
}

KernelScope::KernelScope(const KernelPlugin* plugin)
    : before_{in_use().cuda.exchange(plugin && plugin->memory == KernelMemory::kCuda ? plugin : nullptr),
              in_use().host.exchange(plugin && plugin->memory == KernelMemory::kHost ? plugin : nullptr)} {}
KernelScope::~KernelScope() {
  in_use().cuda = before_[0];
  in_use().host = before_[1];
}

PlainOperators::PlainOperators(bool on) noexcept : before_(plain_operators) {
  plain_operators = plain_operators || on;
}
PlainOperators::~PlainOperators() {
  plain_operators = before_;
}
bool PlainOperators::on() noexcept {
  return plain_operators;
}

bool wants_gradient(const at::Tensor& x) {
  return at::GradMode::is_enabled() && x.requires_grad();
}

bool own_kernels(const at::Tensor& like) {
  const bool known = like.scalar_type() == at::kFloat || like.scalar_type() == at::kBFloat16;
  return known && !plain_operators && kernels_of(like.device());
}

SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight, double epsilon,
                        bool one_plus) {
  if (wants_gradient(x) || wants_gradient(added)) {
    const auto made =
        NormFunction::apply(x, added.defined() ? std::optional(added) : std::nullopt, weight, epsilon, one_plus);
    return {added.defined() ? made[1] : x, made[0]};
  }
  const Normed made = normalise(x, added, weight, epsilon, one_plus);
  return {added.defined() ? made.sum : x, made.normed};
}

at::Tensor gated(const at::Tensor& gate_NF, const at::Tensor& up_NF, bool in_place) {
  const at::Tensor gate = with_dense_rows(gate_NF), up = with_dense_rows(up_NF);
  if (wants_gradient(gate) || wants_gradient(up)) return GateFunction::apply(gate, up);
  return gate_opened(gate, up, in_place && gate.is_contiguous() ? gate : at::empty(gate.sizes(), gate.options()));
}

at::Tensor rotate_heads(const at::Tensor& x_Nhd, const at::Tensor& cos, const at::Tensor& sin, bool interleaved) {
  if (wants_gradient(x_Nhd)) return RotateFunction::apply(x_Nhd, cos, sin, interleaved);
  return rotated(x_Nhd, cos, sin, interleaved, /*back=*/false);
}

at::Tensor rotate_into_cache(const at::Tensor& q_Nhd, const at::Tensor& k_Ngd, const at::Tensor& v_Ngd,
                             const at::Tensor& cos, const at::Tensor& sin, bool interleaved, at::Tensor& keys_BgSd,
                             at::Tensor& values_BgSd, const at::Tensor& row_N, const at::Tensor& slot_N) {
  const at::Tensor q = with_dense_rows(q_Nhd), k = with_dense_rows(k_Ngd), v = with_dense_rows(v_Ngd);
  at::Tensor turned = at::empty(q.sizes(), q.options());
  RotateHeads work = tables_of(q, cos, sin, interleaved, /*back=*/false);
  work.parts[0] = plain_part(q, turned, true);
  const auto to_slots = [](const at::Tensor& x, at::Tensor& to, bool rotated) {
    return HeadPart{x.const_data_ptr(), to.data_ptr(), x.size(1),    x.stride(0), x.stride(1),
                    to.stride(0),       to.stride(1),  to.stride(2), rotated,     true};
  };
  work.parts[1] = to_slots(k, keys_BgSd, true);
  work.parts[2] = to_slots(v, values_BgSd, false);
  work.n_parts = 3;
  work.row = row_N.const_data_ptr<int64_t>(), work.slot = slot_N.const_data_ptr<int64_t>();
  start(q, work.tokens, &KernelPlugin::rotate_heads, work);
  return turned;
}

HeadLosses head_loss(const at::Tensor& logits_MV, const at::Tensor& labels_M, const at::Tensor& weight_M,
                     const at::Tensor& floor_M, bool gradient) {
  const at::Tensor logits = dense(logits_MV), labels = dense(labels_M), weight = dense(weight_M),
                   floor = dense(floor_M);
  const auto numbers = logits.options().dtype(at::kFloat);
  const HeadLosses made{at::empty({logits.size(0)}, numbers), at::empty({logits.size(0)}, numbers.dtype(at::kBool)),
                        gradient ? at::empty_like(logits) : at::Tensor()};
  const auto work =
      made_of<HeadLoss>(in(logits), in<int64_t>(labels), in<float>(weight), in<float>(floor), out<float>(made.nll_M),
                        out<bool>(made.hit_M), out(made.grad_MV), logits.size(0), logits.size(1));
  start(logits, logits.size(0), &KernelPlugin::head_loss, work);
  return made;
}

at::Tensor ball_adam(const at::Tensor& value_BD, const at::Tensor& grad_BD, at::Tensor& first_BD, at::Tensor& second_BD,
                     const at::Tensor& power1_B1, const at::Tensor& power2_B1, const at::Tensor& limit_B1,
                     const BallAdamStep& step) {
  EMEND_CHECK(first_BD.is_contiguous() && second_BD.is_contiguous(), "moments are written in place");
  const at::Tensor value = dense(value_BD), grad = dense(grad_BD), limit = dense(limit_B1),
                   moved = at::empty_like(value), power1 = dense(power1_B1), power2 = dense(power2_B1);
  const auto work =
      made_of<BallAdam>(in<float>(value), in<float>(grad), in<float>(limit), in<double>(power1), in<double>(power2),
                        out<float>(first_BD), out<float>(second_BD), out<float>(moved), value.size(0), value.size(1),
                        step.rate, step.beta1, step.beta2, step.epsilon);
  start(value, value.size(0), &KernelPlugin::ball_adam, work);
  return moved;
}

}  // namespace emend::devices
