// Linear algebra of the closed-form updates, in float64 unless asked otherwise. Never an explicit inverse.
//   F key width · E edits · D value width · P earlier keys
#pragma once

#include <emend/editors/steps/statistics.h>

namespace emend::editors {

/// x for systems solved beside `like`: on its device, in `dtype`.
[[nodiscard]] at::Tensor routed(const at::Tensor& x, const at::Tensor& like, at::ScalarType dtype);

/// Cholesky factor of a symmetric positive definite matrix.
class SpdFactor {
 public:
  /// If plain Cholesky fails, tries again with 1e-14 … 1e-9 of the mean diagonal added to the diagonal, and reports
  /// that. Throws Error(kNumeric) with advice (more tokens, a larger weight) if that does not help either.
  [[nodiscard]] static SpdFactor of(const at::Tensor& matrix_FF, at::ScalarType dtype = at::kDouble,
                                    const std::string& what = "matrix");
  /// The same for a matrix that `build` makes anew at every call: it is overwritten by its factor, so that one F×F
  /// matrix is held instead of two. `build` is called again only if the plain factorisation fails.
  [[nodiscard]] static SpdFactor of_built(const std::function<at::Tensor()>& build, at::ScalarType dtype,
                                          const std::string& what);
  /// X with (matrix)·X = rhs [F,E]. Holds no copy of the factor.
  [[nodiscard]] at::Tensor solve(const at::Tensor& rhs_FE) const;
  [[nodiscard]] const at::Tensor& lower_FF() const noexcept { return lower_FF_; }
  [[nodiscard]] double jitter() const noexcept { return jitter_; }
  /// (largest/smallest diagonal entry of the factor)²: a lower bound of the condition number.
  [[nodiscard]] double condition() const;
  /// A factor made earlier: L and what of() had added to the diagonal.
  [[nodiscard]] static SpdFactor from_parts(at::Tensor lower_FF, double jitter);

 private:
  at::Tensor lower_FF_;
  double jitter_ = 0;
};

/// λ·C + ridge·I + extra + P·Pᵀ: everything in the system except the new keys.
struct Preserved {
  SecondMoment moment = {};     ///< C; may be absent
  double lambda = 1;            ///< `mom2_update_weight`
  double ridge = 0;             ///< `update_norm_lambda`, L2
  at::Tensor extra_FF = {};     ///< a dense cache ΣKKᵀ, or undefined
  at::Tensor previous_FP = {};  ///< earlier keys, or undefined

  /// The dense matrix, in `dtype`.
  [[nodiscard]] at::Tensor matrix(at::ScalarType dtype, const at::Tensor& like) const;
};

enum class SolveMethod { kAuto, kDense, kPushThrough };  ///< kAuto takes the cheaper one

struct SolveOptions {
  at::ScalarType dtype = at::kDouble;
  SolveMethod method = SolveMethod::kAuto;  ///< kAuto: by operation count, counting factors that exist already
};

struct SolveReport {  ///< how a system was solved
  std::string method;
  double jitter = 0, condition = 0;
};

/// A = (preserved + K·Kᵀ)⁻¹ K, [F,E] in options.dtype on the device of `keys_FE`. Inputs are not modified. Beside C,
/// and matrices as wide as there are keys, one F×F matrix is held at a time: two in all. Push-through: Y =
/// preserved⁻¹K, A = Y(I + KᵀY)⁻¹; with only λC preserved it uses the kept factor of C. Throws Error(kInvalidArgument)
/// on shape mismatch, Error(kNumeric) if not positive definite or not finite.
[[nodiscard]] at::Tensor solve_keys(const at::Tensor& keys_FE, const Preserved& preserved,
                                    const SolveOptions& options = {}, SolveReport* report = nullptr);

/// preserved⁻¹·rhs, [F,E] (ROME's u, EMMET).
[[nodiscard]] at::Tensor solve_preserved(const at::Tensor& rhs_FE, const Preserved& preserved,
                                         const SolveOptions& options = {}, SolveReport* report = nullptr);

}  // namespace emend::editors
