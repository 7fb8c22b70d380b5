// Edits inside the null space of what the layer has seen (AlphaEdit, SPHERE).
//
//   C = Σ e λₑ eᵀ        second moment of the keys
//   P = Σ_{λₑ<τ} e eᵀ     projector onto the directions that the corpus hardly uses
//
// With A = P[Kp, K] (earlier keys, new keys) the system (P(K·Kᵀ + ΣKpKpᵀ)P + L2·I) X = P·K·Rᵀ has the solution
// X = A[(L2·I + AᵀA)⁻¹]_new·Rᵀ: as many unknowns as there are facts, not key dimensions. That is solve_keys() with a
// ridge and projected keys; it goes over to the dense symmetric system where that is less work.
//   F key width · B basis vectors · N facts
#pragma once

#include <emend/editors/steps/locate.h>

namespace emend::editors {

/// P, kept as a basis of the smaller one of the two spaces.
class NullSpace {
 public:
  /// Eigenvectors of C with eigenvalues below `threshold`, in float64 on the device of `like`.
  /// Throws Error(kNumeric) if there is none, with the range of eigenvalues.
  [[nodiscard]] static NullSpace of(const SecondMoment& moment, double threshold, const at::Tensor& like);

  /// P·x for x [F,N], in x's dtype, on x's device.
  [[nodiscard]] at::Tensor project(const at::Tensor& x_FN) const;
  /// P·S·P for a symmetric S.
  [[nodiscard]] at::Tensor project_both(const at::Tensor& sum_FF) const;

 private:
  at::Tensor basis_FB_;
  bool of_kept_ = true;  // whether the basis spans what P keeps or what it takes away
};

struct NullSpaceHparams : SharedHparams {  ///< what null-space editors share
  double nullspace_threshold = 0.02;
  double L2 = 10;
};
[[nodiscard]] const hparams::Schema<NullSpaceHparams>& null_space_schema();  ///< the fields above

/// AlphaEdit's recipe: remembers keys, and its update works inside the null space.
[[nodiscard]] LocateRecipe null_space_recipe(const NullSpaceHparams& hparams, const RecipeInputs& in);

}  // namespace emend::editors
