// MEMIT-FE: From Backward Spreading to Forward Replay: Revisiting Target Construction in LLM Parameter Editing (ICML
// 2026; "FE" in EasyEdit).
//
//   1. z of the first rewritten layer, by MEMIT's optimisation there.
//   2. The plain prompt once more with z in place: what the higher rewritten layers give then are their targets.
//   3. In each layer ΔW = R·Kᵀ(λC + K·Kᵀ)⁻¹ with all of the layer's own residual, R = z_l − current output of layer l.
//
//   F key width · D hidden width · N facts
#include <emend/editors/steps/locate.h>

namespace emend::editors {

static LocateRecipe memit_fe_recipe(const MemitHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = memit_recipe(h, in);
  recipe.replays_forward = true;
  recipe.spread = ResidualSpread::kNone;
  recipe.targets.sites[0].layer = static_cast<int>(h.layers.front());
  return recipe;
}

EditorInfo make_memit_fe() {
  return locate_entry<MemitHparams>(
      "memit-fe", "MEMIT with a target of its own for every layer, from replaying the first layer's",
      "From Backward Spreading to Forward Replay: Revisiting Target Construction in LLM Parameter Editing, ICML 2026",
      memit_hparams_schema(), memit_fe_recipe);
}

}  // namespace emend::editors
