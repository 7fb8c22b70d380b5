// EMMET: A Unified Framework for Model Editing (Gupta et al., 2024): MEMIT's targets and keys, ROME's equality
// constraint for a whole batch.
//
//   minimise ‖(Ŵ − W)K0‖² subject to Ŵ K = M:    ΔW = R D⁻¹ Kᵀ C'⁻¹,    D = Kᵀ C'⁻¹ K + λ_e·I
//
//   C'    mom2_update_weight·C + update_norm_lambda·I
//   λ_e   emmet_lambda: the constraint is met exactly where it is 0. Added only for more than one fact, as the authors
//         do: one fact alone is R-ROME.
//   F key width · N facts
//
// Facts with equal keys make D singular if λ_e = 0. The least-squares solution then averages their targets.
#include <ATen/ATen.h>
#include <emend/editors/steps/locate.h>

namespace emend::editors {
namespace {

struct EmmetHparams : hparams::LocateHparams {
  double mom2_update_weight = 1;
  double update_norm_lambda = 0;
  double emmet_lambda = 0.1;
};

// D⁻¹ [N,N], the pseudo-inverse where keys are equal. D comes out of a system that was solved in `dtype`: its condition
// number counts as that of a singular matrix where less than a third of the digits are kept beyond.
at::Tensor inverse_of(const at::Tensor& d_NN, at::ScalarType dtype) {
  const double singular = dtype == at::kDouble ? 1e11 : 1e5;
  const auto factor = SpdFactor::of(d_NN, dtype, "Kᵀ C⁻¹ K");
  if (factor.jitter() == 0 && factor.condition() < singular) return factor.solve(at::eye(d_NN.size(0), d_NN.options()));
  return at::linalg_pinv(d_NN, 1 / singular, true);
}

LayerUpdate emmet_update(const EmmetHparams& h, const LayerProblem& problem) {
  LayerUpdate update;
  const at::Tensor& keys_FN = problem.keys_FN;
  const at::Tensor y_FN = solve_preserved(keys_FN, preserved_of(problem, h.mom2_update_weight, h.update_norm_lambda),
                                          {problem.dtype}, &update.solve);
  at::Tensor d_NN = keys_FN.t().mm(y_FN);
  d_NN = (d_NN + d_NN.t()) / 2;
  if (keys_FN.size(1) > 1) d_NN.diagonal().add_(h.emmet_lambda);
  update.delta = WeightDelta::factors(problem.site, problem.residual_DN, y_FN.mm(inverse_of(d_NN, problem.dtype)));
  update.more["D"] = d_NN;
  return update;
}

LocateRecipe emmet_recipe(const EmmetHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = locate_recipe(h, in);
  recipe.update = [h](const LayerProblem& problem) { return emmet_update(h, problem); };
  return recipe;
}

}  // namespace

EditorInfo make_emmet() {
  using H = EmmetHparams;
  static const auto schema =
      hparams::Schema<H>("emmet")
          .include(hparams::locate_schema())
          .field("mom2_update_weight", &H::mom2_update_weight, "weight of the second moment",
                 {.formula = "C' = weight C + update_norm_lambda I", .above = 0})
          .field("update_norm_lambda", &H::update_norm_lambda, "weight of the size of the change; 0 disables it",
                 {.min = 0})
          .field("emmet_lambda", &H::emmet_lambda,
                 "how far the facts may be missed; 0 asks for all of them exactly. Not added for one fact",
                 {.formula = "D = Kt C'^-1 K + lambda I", .min = 0})
          .unused("calculate_objective_value", "a printout of the reference");
  return locate_entry("emmet", "many facts at once, each met exactly instead of weighed",
                      "Gupta et al., A Unified Framework for Model Editing, EMNLP Findings 2024", schema, emmet_recipe);
}

}  // namespace emend::editors
