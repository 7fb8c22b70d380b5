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

}  // namespace emend::editors
