// Restraints that go on top of any closed-form batch editor, one hyper-parameter each; 0 switches them off.
//
//   nas      Norm-Anchor Scaling (arXiv 2602.02543): v = m + δ, what the MLP is to give, is brought back to the norm
//            that such values have in the unedited model:  z = (t0 − m) + v·a/‖v‖
//   revive   REVIVE (arXiv 2601.11042): ΔW = Σ c_ij u_i v_jᵀ over the singular vectors of the unedited weight; the
//            parts with i or j among the leading k go:  ΔW ← (I − U_k U_kᵀ) ΔW (I − V_k V_kᵀ)
//   simie    SimIE (EasyEdit): each batch's change acts on its own keys only, as far as a least-squares memory of all
//            keys lets it:  ΔW ← ΔW K Kᵀ (λI + ΣKpKpᵀ + K Kᵀ)⁻¹
//
//   suit     the key half of SUIT (arXiv 2509.24502): keys lose the directions that the keys of many names share
//            (names_share):  k ← k − U Uᵀ k
//
//   D hidden width · F key width · K leading directions · N facts
#pragma once

#include <emend/editors/steps/delta.h>

#include <map>

namespace emend::editors {

struct EditContext;
struct LayerProblem;

struct Modifiers {
  bool nas = false;
  double nas_norm = 0;  ///< a; 0: the mean over the first batch's targets, without the largest twentieth
  double revive = 0;    ///< share of Σσ² that the leading directions hold
  double simie = 0;     ///< λ
  double suit = 0;      ///< share of Σσ² of the names' keys that the shared directions hold
  /// Leading directions by layer, once they are known: work saved, not state.
  std::shared_ptr<std::map<int, std::pair<at::Tensor, at::Tensor>>> leading = {};

  /// What changes a layer's update before it is written.
  [[nodiscard]] bool any_update() const { return revive > 0 || simie > 0; }
};

/// The mean of `norms` without the largest twentieth. Throws Error(kNumeric) if one is not finite.
[[nodiscard]] double anchor_norm(std::vector<double> norms);

/// The target with the MLP's part at the anchor's norm; the unedited value where ‖m + δ‖ is more than twice as long,
/// which is an optimisation that has run away.
[[nodiscard]] at::Tensor anchored_target(const at::Tensor& initial_D, const at::Tensor& delta_D,
                                         const at::Tensor& mlp_D, double norm);

/// Leading singular vectors [D,K] and [F,K] of a weight, float64: as many as it takes to hold `share` of Σσ².
[[nodiscard]] std::pair<at::Tensor, at::Tensor> leading_directions(const at::Tensor& weight_DF, double share);

/// The delta without the parts in these directions; factors stay factors.
[[nodiscard]] WeightDelta without_directions(const WeightDelta& delta, const at::Tensor& left_DK,
                                             const at::Tensor& right_FK);

/// SUIT's shared directions of each layer: the leading left singular vectors [F,K] of the keys of the bundled facts'
/// subjects, float64, host, for the model as it is.
[[nodiscard]] std::vector<at::Tensor> names_share(const models::Model& model, const std::vector<int>& layers,
                                                  double share, const EditContext& context);

/// x − U Uᵀ x in x's dtype, on its device; x itself where U is undefined.
[[nodiscard]] at::Tensor outside(const at::Tensor& x, const at::Tensor& basis);

/// The delta as the modifiers leave it. `original_DF` is the unedited weight in paper orientation (revive only).
[[nodiscard]] WeightDelta modified(const Modifiers& modifiers, const LayerProblem& problem, const WeightDelta& delta);

}  // namespace emend::editors
