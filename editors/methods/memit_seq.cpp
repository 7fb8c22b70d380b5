// Sequential MEMIT: MEMIT on the live model, batch after batch, with the keys of earlier batches among what is
// preserved. The baseline of the AlphaEdit repository (memit_seq).
//
//   ΔW = R·Kᵀ(λC + ΣKpKpᵀ + K·Kᵀ)⁻¹, Kp the keys of all earlier batches, taken from the model after their batch
#include <emend/editors/steps/locate.h>

namespace emend::editors {

static LocateRecipe memit_seq_recipe(const MemitHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = memit_recipe(h, in);
  recipe.remembers_keys = true;
  return recipe;
}

EditorInfo make_memit_seq() {
  return locate_entry<MemitHparams>("memit-seq", "MEMIT in many batches, preserving the facts of earlier ones",
                                    "Meng et al., 2023, with the key cache of Fang et al., AlphaEdit, ICLR 2025",
                                    memit_hparams_schema(), memit_seq_recipe);
}

}  // namespace emend::editors
