// Gates: linear functions that are open at some hidden states and shut at all others.
//   N rows · D their width
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace emend::editors {

/// Fits many gates over the same rows. A gate g is the minimiser of
///   ½ Σ_n c_n·max(0, 1 − y_n·gᵀx_n)² + ½ ρ‖g‖²,   y_n = +1 where it is open, −1 where it is shut,
/// a support vector machine with squared hinge, found by Newton's steps over the rows within the margin (Chapelle,
/// Training a Support Vector Machine in the Primal, 2007). There is no offset: an MLP's input need not have one.
class GateFit {
 public:
  /// rows_ND any float dtype, on the device where the systems are solved; usual_N [N] the weight c of each row for a
  /// gate that is shut everywhere, the same for all gates. ρ is `ridge` times the mean diagonal of Σ c x xᵀ. Throws
  /// Error(kNumeric) if a row is not finite.
  GateFit(at::Tensor rows_ND, at::Tensor usual_N, double ridge = 1e-3);
  ~GateFit();

  /// [D] in float32 on the rows' device. sign_N [N] ±1; weight_N [N] the c of this gate. At most `steps` steps.
  [[nodiscard]] at::Tensor fit(const at::Tensor& sign_N, const at::Tensor& weight_N, int64_t steps = 12) const;
  /// [D] u with uᵀx ≈ 1 on all rows, by weighted least squares with the same ρ.
  [[nodiscard]] at::Tensor constant() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace emend::editors
