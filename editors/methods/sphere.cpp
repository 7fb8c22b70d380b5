// SPHERE: Energy-Regularized Sequential Model Editing on Hyperspheres (Liu et al., ICLR 2026).
//
//   1. ΔW as AlphaEdit, all layers.
//   2. U: the principal directions of W's rows, each scaled to length 1; as many as hold the share cumulative_ratio of
//      the eigenvalues of ŴᵀŴ/D, and one more.
//   3. ΔW ← ΔW(I − suppression_strength·U·Uᵀ).
//
//   D hidden width · F key width · R principal directions
#include <ATen/ATen.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/null_space.h>

namespace emend::editors {
namespace {

struct SphereHparams : NullSpaceHparams {
  double cumulative_ratio = 0.5;
  double suppression_strength = 0.5;
};

WeightDelta weakened(const models::EditSite& site, const WeightDelta& solved, const at::Tensor& weight_DF, double ratio,
                     double strength) {
  const at::Tensor changed = (solved.low_rank() ? solved.right_FR.t() : solved.dense_DF).to(at::kDouble);  // [R or D,F]
  const at::Tensor weight = devices::route_like(weight_DF, changed, devices::Purpose::kSolve).to(at::kDouble);
  const at::Tensor rows_DF = weight / (weight.norm(2, 1, /*keepdim=*/true) + 1e-8);
  const auto [u, sigma_R, directions_RF] = at::linalg_svd(rows_DF, /*full_matrices=*/false);
  const at::Tensor share_R = sigma_R.square().cumsum(0) / sigma_R.square().sum();
  const int64_t count = std::min<int64_t>(share_R.le(ratio).sum().item<int64_t>() + 1, sigma_R.size(0));
  const at::Tensor principal_RF = directions_RF.narrow(0, 0, count);
  const at::Tensor left = changed - changed.mm(principal_RF.t()).mm(principal_RF) * strength;
  return solved.low_rank() ? WeightDelta::factors(site, solved.left_DR, left.t().contiguous())
                           : WeightDelta::dense(site, left);
}

LocateRecipe sphere_recipe(const SphereHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = null_space_recipe(h, in);
  const double ratio = h.cumulative_ratio, strength = h.suppression_strength;
  if (ratio > 0 && strength > 0)
    recipe.settle = [ratio, strength](const auto& site, const auto& solved, const auto& weight_DF) {
      return weakened(site, solved, weight_DF, ratio, strength);
    };
  return recipe;
}

}  // namespace

EditorInfo make_sphere() {
  using H = SphereHparams;
  static const auto schema =
      hparams::Schema<H>("sphere")
          .include(null_space_schema())
          .field("cumulative_ratio", &H::cumulative_ratio,
                 "share of the rows' spread that the principal directions hold; 0 disables the step",
                 {.formula = "η", .min = 0, .max = 1})
          .field("suppression_strength", &H::suppression_strength,
                 "how much of the change along them is taken away; 0 disables the step",
                 {.formula = "α in ΔW(I − α U Uᵀ)",
                  .min = 0,
                  .max = 1,
                  .aliases = {"suppression strength"}})  // as EasyEdit's files spell it
          .check("rounds", one_round);
  return locate_entry("sphere", "AlphaEdit, weakened along the principal directions of the weight's rows",
                      "Liu et al., Energy-Regularized Sequential Model Editing on Hyperspheres, ICLR 2026", schema,
                      sphere_recipe);
}

}  // namespace emend::editors
