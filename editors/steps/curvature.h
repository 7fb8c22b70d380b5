// Kronecker-factored curvature of a loss in the rewritten matrix of a layer (K-FAC, Martens and Grosse, 2015):
//
//   H ≈ A ⊗ B,   A = E[k kᵀ],   B = E[g gᵀ]        over tokens; g: gradient of the token losses' sum at the output
//
//   F key width · D hidden width · R rows
#pragma once

#include <emend/editors/editor.h>
#include <emend/editors/steps/learning_pass.h>

namespace emend::editors {

/// Sums over tokens of one layer, float64, host.
struct Curvature {
  at::Tensor inputs_FF, gradients_DD;  ///< Σkkᵀ, Σggᵀ
  double tokens = 0;

  /// Both texts together.
  [[nodiscard]] Curvature with(const Curvature& other) const;
};

/// Every token predicted from the ones before it. Rows of a single token are left out.
[[nodiscard]] std::vector<LearningRow> text_learning_rows(const std::vector<std::vector<int64_t>>& rows);

/// The curvature of Σ −log p(label) over the rows, at the tokens that have labels, in these layers (ascending), with
/// the weights as they are. Throws Error(kInvalidArgument) for no rows, Error(kNumeric) if a loss is not finite,
/// Error(kCancelled).
[[nodiscard]] std::vector<Curvature> curvature_of(const models::Model& model, const std::vector<LearningRow>& rows,
                                                  const std::vector<int>& layers, const EditContext& context);

/// The directions of a weight in which a loss is flat: eigenvectors u_j v_iᵀ of A ⊗ B without the fewest with the
/// largest eigenvalues b_j·a_i that hold the share `energy` of their sum.
class FlatDirections {
 public:
  /// Of a layer's sums; `energy` from 0 (all directions but one) to 1 (hardly any). float64, host.
  [[nodiscard]] static FlatDirections of(const Curvature& curvature, double energy);

  /// The part of x [D,F] in these directions, in x's dtype and on its device:  U((Uᵀ x V) ∘ M)Vᵀ
  [[nodiscard]] at::Tensor project(const at::Tensor& x_DF) const;

 private:
  at::Tensor out_DD_, in_FF_, mask_DF_;  // U, V, M (bool)
};

}  // namespace emend::editors
