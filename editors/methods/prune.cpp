// PRUNE: Perturbation-Restrained Sequential Model Editing (Ma et al., ICLR 2025), section 4.
//
//   1. Batches are written as by MEMIT.
//   2. Once, after the last batch, with W0 the original weight and ΔW = W − W0 = Σ σᵢ uᵢ vᵢᵀ the sum of all changes:
//      W ← W0 + Σ F(σᵢ) uᵢ vᵢᵀ,  F(σ) = log_α σ − log_α s + s for σ > s, else σ,  s = the largest singular value of W0.
//
// The restrained change replaces the old one. (A published re-implementation adds it to the edited weight.) Where s·ln
// α < 1, F would make values a little above s larger: they stay as they are.
//   D hidden width · F key width · R restrained directions
#include <ATen/ATen.h>
#include <emend/editors/steps/locate.h>

#include <cmath>

namespace emend::editors {
namespace {

struct PruneHparams : MemitHparams {
  double restraint_base = 2.718281828459045;
  bool history = false;
};

std::optional<LayerUpdate> restrain(const models::EditSite& site, const at::Tensor& original_DF,
                                    const at::Tensor& change_DF, double base) {
  const double limit = at::linalg_svdvals(original_DF).max().item<double>();
  const auto [u_DR, sigma_R, vt_RF] = at::linalg_svd(change_DF, /*full_matrices=*/false);
  const int64_t large = sigma_R.gt(limit).sum().item<int64_t>();
  if (large == 0) return std::nullopt;
  const at::Tensor sigma = sigma_R.narrow(0, 0, large);
  const at::Tensor restrained = at::minimum((sigma / limit).log() / std::log(base) + limit, sigma);
  LayerUpdate update;
  update.delta = WeightDelta::factors(site, u_DR.narrow(1, 0, large) * (restrained - sigma),
                                      vt_RF.narrow(0, 0, large).t().contiguous());
  update.solve.method = "restrained " + std::to_string(large) + " directions";
  return update;
}

LocateRecipe prune_recipe(const PruneHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = memit_recipe(h, in);
  recipe.remembers_keys = recipe.keys_as_written = recipe.compensates = h.history;
  recipe.correct = [base = h.restraint_base](const auto& site, const auto& original_DF, const auto& change_DF) {
    return restrain(site, original_DF, change_DF, base);
  };
  return recipe;
}

}  // namespace

EditorInfo make_prune() {
  using H = PruneHparams;
  static const auto schema =
      hparams::Schema<H>("prune")
          .include(memit_hparams_schema())
          .field("restraint_base", &H::restraint_base,
                 "base of the logarithm that shortens large singular values; a larger one shortens more",
                 {.formula = "α in F(σ) = log_α σ − log_α s + s for σ > s = σmax(W)", .above = 1})
          .field("history", &H::history, history_field())
          .check("rounds", [](const H& h) { return h.history ? one_round(h) : std::string(); });
  return locate_entry("prune",
                      "MEMIT in many batches; at the end the singular values of the whole change are restrained",
                      "Ma et al., Perturbation-Restrained Sequential Model Editing, ICLR 2025", schema, prune_recipe);
}

}  // namespace emend::editors
