#include <emend/editors/memit_family.h>

namespace emend::editors {

const hparams::Schema<SharedHparams>& shared_hparams_schema() {
  static const auto schema =
      hparams::Schema<SharedHparams>("batch")
          .include(hparams::locate_schema())
          .field("merge_equal_keys", &SharedHparams::merge_equal_keys,
                 {.meaning = "facts about the same subject with equal keys share one target",
                  .formula = "MEMIT-Merge, arXiv 2502.07322"})
          .field("rounds", &SharedHparams::rounds,
                 {.meaning = "number of times a batch is edited; from the second on only the facts that have not taken",
                  .min = 1})
          .field("round_probability", &SharedHparams::round_probability,
                 {.meaning = "probability of the target below which a fact has not taken",
                  .formula = "exp(mean log p of the target's tokens after the plain prompt)",
                  .min = 0,
                  .max = 1});
  return schema;
}

const hparams::Schema<MemitHparams>& memit_hparams_schema() {
  static const auto schema = hparams::Schema<MemitHparams>("memit")
                                 .include(shared_hparams_schema())
                                 .field("mom2_update_weight", &MemitHparams::mom2_update_weight,
                                        {.meaning = "weight of what the layer already does",
                                         .formula = "λ in ΔW = R Kᵀ (λC + K Kᵀ)⁻¹",
                                         .above = 0});
  return schema;
}

std::string one_round(const SharedHparams& hparams) {
  return hparams.rounds > 1 ? "1, because this editor writes a batch only once" : "";
}

LocateRecipe memit_family_recipe(std::string editor, nlohmann::json effective, const SharedHparams& hparams,
                                 const models::Model& model, const hparams::RawHparams& raw) {
  LocateRecipe recipe = memit_recipe(std::move(editor), std::move(effective), hparams, model, raw);
  recipe.merge_equal_keys = hparams.merge_equal_keys;
  recipe.rounds = {hparams.rounds, hparams.round_probability};
  return recipe;
}

LayerUpdate MemitEditor::update(const LayerProblem& problem) const {
  return closed_form(problem, preserved_of(problem, lambda_));
}

}  // namespace emend::editors
