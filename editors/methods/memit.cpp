// MEMIT: Mass-Editing Memory in a Transformer (Meng et al., 2023), section 4.
//
//   1. z_i: the hidden state at the output of the last rewritten layer that makes the model say fact i (targets.h).
//   2. For each rewritten layer l, lowest first, with the model as the layers below have left it:
//      K     keys of the facts at layer l, the plain prompt weighing as much as all sampled contexts together
//      R     (z − current hidden state) / layers still to go
//      ΔW    = R·Kᵀ(λC + K·Kᵀ)⁻¹, C the second moment of keys over a corpus
//
//   F key width · D hidden width · N facts
#include <ATen/ATen.h>
#include <emend/editors/locate.h>
#include <emend/editors/registry.h>

namespace emend::editors {
namespace {

struct MemitHparams : hparams::LocateHparams {
  double mom2_update_weight = 15000;
  bool merge_equal_keys = false;
};

const hparams::Schema<MemitHparams>& memit_schema() {
  static const auto schema =
      hparams::Schema<MemitHparams>("memit")
          .include(hparams::locate_schema())
          .field("mom2_update_weight", &MemitHparams::mom2_update_weight,
                 {.meaning = "weight of what the layer already does", .formula = "λ in ΔW = R Kᵀ (λC + K Kᵀ)⁻¹", .above = 0})
          .field("merge_equal_keys", &MemitHparams::merge_equal_keys,
                 {.meaning = "facts about the same subject with equal keys share one target", .formula = "MEMIT-Merge, arXiv 2502.07322"});
  return schema;
}

class Memit final : public LocateEditor {
 public:
  Memit(LocateRecipe recipe, double lambda) : LocateEditor(std::move(recipe)), lambda_(lambda) {}

  [[nodiscard]] LayerUpdate update(const LayerProblem& problem) const override {
    LayerUpdate update;
    const at::Tensor adj_FN = solve_keys(problem.keys_FN, {problem.moment, lambda_, 0, {}, {}}, {problem.dtype}, &update.solve);
    update.delta = WeightDelta::factors(problem.site, problem.residual_DN, adj_FN);
    return update;
  }

 private:
  double lambda_;
};

std::unique_ptr<Editor> make(const MemitHparams& h, const hparams::RawHparams& raw, const models::Model& model, const Log&) {
  check_locate_hparams(h, model, raw);
  LocateRecipe recipe;
  recipe.editor = "memit";
  recipe.hparams = memit_schema().dump(h);
  recipe.common = h;
  recipe.targets = memit_targets(h, model);
  recipe.merge_equal_keys = h.merge_equal_keys;
  return std::make_unique<Memit>(std::move(recipe), h.mom2_update_weight);
}

}  // namespace

EditorInfo make_memit() {
  return editor_entry<MemitHparams>("memit", "many facts at once, spread over several layers",
                                    "Meng et al., Mass-Editing Memory in a Transformer, ICLR 2023", memit_schema(), make);
}

}  // namespace emend::editors
