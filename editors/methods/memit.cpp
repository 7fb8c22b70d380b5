// MEMIT: Mass-Editing Memory in a Transformer (Meng et al., 2023), section 4.
//
//   1. z_i: the hidden state at the output of the last rewritten layer that makes the model say fact i (targets.h).
//   2. For each rewritten layer l, lowest first, with the model as the layers below have left it:
//      K     keys of the facts at layer l, the plain prompt weighing as much as all sampled contexts together
//      R     (z − current hidden state) / layers still to go
//      ΔW    = R·Kᵀ(λC + K·Kᵀ)⁻¹, C the second moment of keys over a corpus
//
//   F key width · D hidden width · N facts
#include <emend/editors/memit_family.h>
#include <emend/editors/registry.h>

namespace emend::editors {
namespace {

std::unique_ptr<Editor> make(const MemitHparams& h, const hparams::RawHparams& raw, const models::Model& model,
                             const Log&) {
  return std::make_unique<MemitEditor>(memit_family_recipe("memit", memit_hparams_schema().dump(h), h, model, raw),
                                       h.mom2_update_weight);
}

}  // namespace

EditorInfo make_memit() {
  return editor_entry<MemitHparams>("memit", "many facts at once, spread over several layers",
                                    "Meng et al., Mass-Editing Memory in a Transformer, ICLR 2023",
                                    memit_hparams_schema(), make);
}

}  // namespace emend::editors
