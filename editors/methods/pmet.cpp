// PMET: Precise Model Editing in a Transformer (Li et al., 2024).
//
//   1. Two variables, at the outputs of the attention and of the rewritten matrix of the last layer in `layers`, are
//      optimised together: what attention would have to say is kept out of what the MLP has to learn.
//      loss = nll_loss_factor·nll + kl + weight decay of both; it also stops when the target is the most probable
//      continuation everywhere.
//   2. For each layer: ΔW = R Kᵀ (λC + K Kᵀ)⁻¹ with R = (z_mlp − current output of that matrix)/sqrt(layers still to
//      go).
//
// Only the MLP's matrix is written; the attention's target is left, as in all published settings.
#include <emend/editors/steps/locate.h>
#include <emend/models/config.h>
#include <emend/models/family.h>

namespace emend::editors {
namespace {

struct PmetHparams : MemitHparams {
  double nll_loss_factor = 1;
  std::vector<std::string> rewrite_module_tmps;
};

// The reference can write the attention's matrix too; no published settings do, and its keys have no statistics here.
void check_rewritten(const PmetHparams& h, const hparams::RawHparams& raw, const models::Model& model) {
  if (h.rewrite_module_tmps.size() > 1)
    throw Error(ErrorClass::kUnsupported,
                {raw.where("rewrite_module_tmps"), std::to_string(h.rewrite_module_tmps.size()) + " matrices a layer",
                 "the MLP's output matrix alone", "leave the attention's matrix out"});
  for (const std::string& name : h.rewrite_module_tmps)
    models::check_module_names(model.family(), model.config(), {"", "", "", name, "", ""},
                               [&](const char*) { return raw.where("rewrite_module_tmps"); });
}

LocateRecipe pmet_recipe(const PmetHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = memit_recipe(h, in);
  check_rewritten(h, in.raw, in.model);
  const int layer = recipe.targets.sites[0].layer;
  recipe.targets.sites = {{hooks::Site::kMlpDownOut, layer}, {hooks::Site::kAttnOut, layer}};
  recipe.targets.nll_factor = h.nll_loss_factor;
  recipe.targets.stop_rule = StopRule::kArgmax;
  recipe.spread = ResidualSpread::kSqrt;
  return recipe;
}

}  // namespace

EditorInfo make_pmet() {
  using H = PmetHparams;
  static const auto schema =
      hparams::Schema<H>("pmet")
          .include(memit_hparams_schema())
          .field("nll_loss_factor", &H::nll_loss_factor, "weight of the target's likelihood in the loss", {.min = 0})
          .field("rewrite_module_tmps", &H::rewrite_module_tmps,
                 "paths of the rewritten matrices; the MLP's output matrix is the one that can be");
  return locate_entry("pmet", "many facts at once; attention and MLP optimised together, the MLP written",
                      "Li et al., PMET: Precise Model Editing in a Transformer, AAAI 2024", schema, pmet_recipe);
}

}  // namespace emend::editors
