// MEMIT: Mass-Editing Memory in a Transformer (Meng et al., 2023), section 4.
//
//   1. z_i: the hidden state at the output of the last rewritten layer that makes the model say fact i (targets.h).
//   2. For each rewritten layer l, lowest first, with the model as the layers below have left it:
//      K     keys of the facts at layer l, the plain prompt weighing as much as all sampled contexts together
//      R     (z − current hidden state) / layers still to go
//      ΔW    = R·Kᵀ(λC + K·Kᵀ)⁻¹, C the second moment of keys over a corpus
//
//   F key width · D hidden width · N facts
#include <emend/editors/steps/locate.h>

namespace emend::editors {

EditorInfo make_memit() {
  return locate_entry<MemitHparams>("memit", "many facts at once, spread over several layers",
                                    "Meng et al., Mass-Editing Memory in a Transformer, ICLR 2023",
                                    memit_hparams_schema(), memit_recipe);
}

// Sequential MEMIT: MEMIT on the live model, batch after batch, with the keys of earlier batches among what is
// preserved. The baseline of the AlphaEdit repository (memit_seq).
//
//   ΔW = R·Kᵀ(λC + ΣKpKpᵀ + K·Kᵀ)⁻¹, Kp the keys of all earlier batches, taken from the model after their batch
EditorInfo make_memit_seq() {
  return locate_entry<MemitHparams>("memit-seq", "MEMIT in many batches, preserving the facts of earlier ones",
                                    "Meng et al., 2023, with the key cache of Fang et al., AlphaEdit, ICLR 2025",
                                    memit_hparams_schema(), [](const MemitHparams& h, const RecipeInputs& in) {
                                      LocateRecipe recipe = memit_recipe(h, in);
                                      recipe.remembers_keys = true;
                                      return recipe;
                                    });
}

// MEMIT-FE: From Backward Spreading to Forward Replay: Revisiting Target Construction in LLM Parameter Editing (ICML
// 2026; "FE" in EasyEdit).
//
//   1. z of the first rewritten layer, by MEMIT's optimisation there.
//   2. The plain prompt once more with z in place: what the higher rewritten layers give then are their targets.
//   3. In each layer ΔW = R·Kᵀ(λC + K·Kᵀ)⁻¹ with all of the layer's own residual, R = z_l − current output of layer l.
EditorInfo make_memit_fe() {
  return locate_entry<MemitHparams>(
      "memit-fe", "MEMIT with a target of its own for every layer, from replaying the first layer's",
      "From Backward Spreading to Forward Replay: Revisiting Target Construction in LLM Parameter Editing, ICML 2026",
      memit_hparams_schema(), [](const MemitHparams& h, const RecipeInputs& in) {
        LocateRecipe recipe = memit_recipe(h, in);
        recipe.replays_forward = true;
        recipe.spread = ResidualSpread::kNone;
        recipe.targets.sites[0].layer = static_cast<int>(h.layers.front());
        return recipe;
      });
}

}  // namespace emend::editors
