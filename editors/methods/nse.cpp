// NSE: Neuron-Level Sequential Editing for Large Language Models (Jiang et al., 2024).
//
//   1. z_i from the model with its original weights, however many batches were written (weights rewinding).
//   2. Up to max_iterations − 1 passes over the layers, each with the facts whose residual ‖z − current‖ lies between
//      alpha and upper_bound.
//   3. In each layer only influential neurons S are written: those with the largest Σ|k|, up to the share
//      neuron_threshold of the sum. ΔW_S = R·K_Sᵀ(λC_SS + ΣKpKpᵀ_SS + K_S·K_Sᵀ)⁻¹, ΔW = 0 elsewhere.
//
//   F key width (neurons) · S selected neurons · N facts
#include <ATen/ATen.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/locate.h>

namespace emend::editors {
namespace {

struct NseHparams : MemitHparams {
  double alpha = 0;
  double upper_bound = 1e9;
  int64_t max_iterations = 3;
  double neuron_threshold = 1;
};

// Indices of the neurons to write, ascending; undefined for all of them.
at::Tensor influential(const at::Tensor& keys_FN, double share) {
  if (share >= 1) return {};
  const auto [scores_F, order_F] = keys_FN.abs().sum(1).sort(/*dim=*/0, /*descending=*/true);
  const int64_t count = scores_F.cumsum(0).le(share * scores_F.sum()).sum().item<int64_t>();
  return std::get<0>(order_F.narrow(0, 0, std::max<int64_t>(1, count)).sort());
}

LayerUpdate nse_update(const LayerProblem& problem, double lambda, double share) {
  const at::Tensor chosen_S = influential(problem.keys_FN, share);
  if (!chosen_S.defined()) return closed_form(problem, preserved_of(problem, lambda));
  const auto select = [&](const at::Tensor& x, int64_t dim) {
    return x.index_select(dim, devices::route_like(chosen_S, x, devices::Purpose::kSolve));
  };
  const auto both = [&](const at::Tensor& x_FF) { return select(select(x_FF, 0), 1); };
  LayerProblem part = problem;
  part.keys_FN = select(problem.keys_FN, 0);
  if (problem.moment) part.moment = SecondMoment(both(problem.moment.cov_FF()));
  at::Tensor &keys_FP = part.earlier.keys_FP, &sum_FF = part.earlier.sum_FF;
  if (keys_FP.defined()) keys_FP = select(keys_FP, 0);
  if (sum_FF.defined()) sum_FF = both(sum_FF);
  LayerUpdate update = closed_form(part, preserved_of(part, lambda));
  const at::Tensor adj_FN = at::zeros_like(problem.keys_FN);
  update.delta.right_FR = adj_FN.index_copy(0, chosen_S, update.delta.right_FR);
  return update;
}

LocateRecipe nse_recipe(const NseHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = shared_recipe(h, in);
  recipe.passes = {h.max_iterations - 1, h.alpha, h.upper_bound};
  recipe.remembers_keys = recipe.rewinds_targets = true;
  recipe.update = [lambda = h.mom2_update_weight, share = h.neuron_threshold](const LayerProblem& problem) {
    return nse_update(problem, lambda, share);
  };
  return recipe;
}

}  // namespace

EditorInfo make_nse() {
  using H = NseHparams;
  static const auto schema =
      hparams::Schema<H>("nse")
          .include(memit_hparams_schema())
          .field("alpha", &H::alpha, "facts with a residual of at most this size count as written", {.min = 0})
          .field("upper_bound", &H::upper_bound, "facts with a residual of at least this size are not written",
                 {.above = 0})
          .field("max_iterations", &H::max_iterations, "passes over the layers; the last one only measures", {.min = 2})
          .field("neuron_threshold", &H::neuron_threshold,
                 "share of the keys' size that the written neurons hold; 1 writes all",
                 {.formula = "largest Σ|k| first, while their sum ≤ threshold · the whole", .max = 1, .above = 0})
          .check("upper_bound", "more than alpha", [](const H& h) { return h.upper_bound > h.alpha; });
  return locate_entry("nse", "many batches, in passes, into the neurons that the facts use most",
                      "Jiang et al., Neuron-Level Sequential Editing for Large Language Models, 2024", schema,
                      nse_recipe);
}

}  // namespace emend::editors
