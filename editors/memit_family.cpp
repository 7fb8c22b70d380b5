#include <emend/editors/memit_family.h>

namespace emend::editors {

const hparams::Schema<MemitHparams>& memit_hparams_schema() {
  static const auto schema = hparams::Schema<MemitHparams>("memit")
                                 .include(hparams::locate_schema())
                                 .field("mom2_update_weight", &MemitHparams::mom2_update_weight,
                                        {.meaning = "weight of what the layer already does",
                                         .formula = "λ in ΔW = R Kᵀ (λC + K Kᵀ)⁻¹",
                                         .above = 0})
                                 .field("merge_equal_keys", &MemitHparams::merge_equal_keys,
                                        {.meaning = "facts about the same subject with equal keys share one target",
                                         .formula = "MEMIT-Merge, arXiv 2502.07322"});
  return schema;
}

LocateRecipe memit_family_recipe(std::string editor, nlohmann::json effective, const MemitHparams& hparams,
                                 const models::Model& model, const hparams::RawHparams& raw) {
  LocateRecipe recipe = memit_recipe(std::move(editor), std::move(effective), hparams, model, raw);
  recipe.merge_equal_keys = hparams.merge_equal_keys;
  return recipe;
}

LayerUpdate MemitEditor::update(const LayerProblem& problem) const {
  return closed_form(problem, preserved_of(problem, lambda_));
}

}  // namespace emend::editors
