// Sequential MEMIT: MEMIT on the live model, batch after batch, with the keys of earlier batches among what is
// preserved. The baseline of the AlphaEdit repository (memit_seq).
//
//   ΔW = R·Kᵀ(λC + ΣKpKpᵀ + K·Kᵀ)⁻¹, Kp the keys of all earlier batches, taken from the model after their batch
#include <emend/editors/key_cache.h>
#include <emend/editors/memit_family.h>
#include <emend/editors/registry.h>

namespace emend::editors {
namespace {

class MemitSeq final : public RememberingEditor {
 public:
  MemitSeq(LocateRecipe recipe, double lambda) : RememberingEditor(std::move(recipe)), lambda_(lambda) {}

  [[nodiscard]] LayerUpdate update(const LayerProblem& problem) const override {
    return closed_form(problem, memory().layer(problem.index).with(preserved_of(problem, lambda_)));
  }

 private:
  double lambda_;
};

std::unique_ptr<Editor> make(const MemitHparams& h, const hparams::RawHparams& raw, const models::Model& model,
                             const Log&) {
  return std::make_unique<MemitSeq>(memit_family_recipe("memit-seq", memit_hparams_schema().dump(h), h, model, raw),
                                    h.mom2_update_weight);
}

}  // namespace

EditorInfo make_memit_seq() {
  return editor_entry<MemitHparams>("memit-seq", "MEMIT in many batches, preserving the facts of earlier ones",
                                    "Meng et al., 2023, with the key cache of Fang et al., AlphaEdit, ICLR 2025",
                                    memit_hparams_schema(), make);
}

}  // namespace emend::editors
