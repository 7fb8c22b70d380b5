// Kernels of our own, and the functions that use them: on the host those that the program holds, on GPUs those of a
// plug-in (devices/plugins/kernel_plugin.h).
//
// On GPUs they are off unless asked for, until measurements on one show that they are worth it: EMEND_CUDA_PLUGIN=on
// looks for libemend_cuda.so beside the program and where the dynamic linker looks, EMEND_CUDA_PLUGIN=FILE names it.
// Callers ask own_kernels() and else do the same with LibTorch's operators, which the tests compare these with.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace emend::devices {

struct KernelPlugin;

/// Whether a gradient for it will be asked for; not for one that is undefined.
[[nodiscard]] bool wants_gradient(const at::Tensor& x);

/// Whether tensors like this one are served: float32 or bfloat16, where there are kernels for its memory. Throws
/// Error(kDevice) where EMEND_CUDA_PLUGIN asks for a plug-in that cannot be used.
[[nodiscard]] bool own_kernels(const at::Tensor& like);

/// A residual stream and what the next part of a layer is given.
struct SumAndNorm {
  at::Tensor sum, normed;
};
/// x + added (or x, if that is undefined) and its RMS norm times weight, or times 1 + weight. Gradients flow to x and
/// added; the weight must need none.
[[nodiscard]] SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight,
                                      double epsilon, bool one_plus);

/// silu(gate)·up, [N,F], with gradients for both. Where none is wanted and `in_place`, the result may lie in gate's
/// memory.
[[nodiscard]] at::Tensor gated(const at::Tensor& gate_NF, const at::Tensor& up_NF, bool in_place);

/// x [N,heads,d] turned by tables [N,1,r] (models/detail/rotary.h), with its gradient.
[[nodiscard]] at::Tensor rotate_heads(const at::Tensor& x_Nhd, const at::Tensor& cos, const at::Tensor& sin,
                                      bool interleaved);
/// The same of q, which is returned, and k, which goes to keys_BgSd[row_N, :, slot_N], v to values_BgSd. No gradient.
[[nodiscard]] at::Tensor rotate_into_cache(const at::Tensor& q_Nhd, const at::Tensor& k_Ngd, const at::Tensor& v_Ngd,
                                           const at::Tensor& cos, const at::Tensor& sin, bool interleaved,
                                           at::Tensor& keys_BgSd, at::Tensor& values_BgSd, const at::Tensor& row_N,
                                           const at::Tensor& slot_N);

/// Of M labelled tokens with V logits each.
struct HeadLosses {
  at::Tensor nll_M, hit_M, grad_MV;
};
/// −log softmax at the labels as far as above the floor (may be undefined), whether the label is the most probable, and
/// (on request) the gradient of Σ weight·nll. All on the device of the logits; weight and floor float32.
[[nodiscard]] HeadLosses head_loss(const at::Tensor& logits_MV, const at::Tensor& labels_M, const at::Tensor& weight_M,
                                   const at::Tensor& floor_M, bool gradient);

/// value after a step of Adam with these moments (which are written), no farther from 0 than `limit_B1`. power1 and
/// power2 are β^t, float64. All others float32.
struct BallAdamStep {
  double rate, beta1, beta2, epsilon;
};
[[nodiscard]] at::Tensor ball_adam(const at::Tensor& value_BD, const at::Tensor& grad_BD, at::Tensor& first_BD,
                                   at::Tensor& second_BD, const at::Tensor& power1_B1, const at::Tensor& power2_B1,
                                   const at::Tensor& limit_B1, const BallAdamStep& step);

/// Opens a file ("on": see above) and checks it; `text` says what was opened, or why not. Never throws.
[[nodiscard]] const KernelPlugin* open_kernel_plugin(const std::string& file, std::string& text);

/// The host's sets that this processor can run, the fastest last.
[[nodiscard]] std::vector<const KernelPlugin*> host_kernels();

/// While it lives, these kernels are used by all threads, or none (null).
class KernelScope {
 public:
  explicit KernelScope(const KernelPlugin* plugin);
  ~KernelScope();
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
  const KernelPlugin* before_[2];
};

/// While it lives, this thread works with LibTorch's operators alone, products included (models/products.h). The
/// reference engines do: LibTorch's default is what the published implementations call.
class PlainOperators {
 public:
  explicit PlainOperators(bool on = true) noexcept;
  ~PlainOperators();
  PlainOperators(const PlainOperators&) = delete;
  PlainOperators& operator=(const PlainOperators&) = delete;
  [[nodiscard]] static bool on() noexcept;  ///< whether one lives in this thread

 private:
  bool before_;
};

}  // namespace emend::devices
