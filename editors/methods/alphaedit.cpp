// AlphaEdit: Null-Space Constrained Knowledge Editing for Language Models (Fang et al., ICLR 2025), section 3.
//
//   1. z_i, keys K and residuals R as in MEMIT, on the live model.
//   2. P projects onto the directions that the corpus hardly uses (null_space.h).
//   3. ΔW = R·Kᵀ·P (P(K·Kᵀ + ΣKpKpᵀ)P + L2·I)⁻¹, Kp the keys of all earlier batches.
//   4. After the last layer: the keys, taken again from the edited model, join Kp.
//
//   F key width · N facts · P earlier keys
#include <emend/editors/steps/null_space.h>

namespace emend::editors {
EditorInfo make_alphaedit() {
  return locate_entry<NullSpaceHparams>(
      "alphaedit", "many batches one after the other, each outside what the layer already uses",
      "Fang et al., AlphaEdit: Null-Space Constrained Knowledge Editing for Language Models, ICLR 2025",
      null_space_schema(), null_space_recipe);
}

}  // namespace emend::editors
