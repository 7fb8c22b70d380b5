// ENCORE: Lifelong Sequential Knowledge Editing without Model Degradation (Gupta et al., 2025): sequential MEMIT with
// two restraints.
//
//   most-probable early stopping   a target has had enough once it is the most probable continuation in all sampled
//                                  contexts, |prob_cutoff| times; what follows would only make it overconfident
//   norm control                   ΔW = R Kᵀ (λC + λ_n·I + ΣKpKpᵀ + K Kᵀ)⁻¹: λ_n = update_norm_lambda weighs ‖ΔW‖²
//
//   Kp keys of all earlier batches, taken from the model after their batch
#include <emend/editors/steps/locate.h>

#include <cmath>

namespace emend::editors {
namespace {

struct EncoreHparams : MemitHparams {
  double update_norm_lambda = 10;
  double prob_cutoff = -3;
  bool add_prev_edits = true;
  double norm_control = 0;
  bool use_gd = false;
  bool random_vector_preservation = false;
};

LocateRecipe encore_recipe(const EncoreHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = shared_recipe(h, in);
  if (h.prob_cutoff < 0) {
    recipe.targets.stop_rule = StopRule::kMostProbable;
    recipe.targets.patience = static_cast<int64_t>(-h.prob_cutoff);
  } else if (h.prob_cutoff > 0) {
    recipe.targets.stop_rule = StopRule::kProbability;
    recipe.targets.stop_probability = h.prob_cutoff;
  }
  recipe.remembers_keys = h.add_prev_edits;
  recipe.update = memit_update(h.mom2_update_weight, h.update_norm_lambda);
  return recipe;
}

}  // namespace

EditorInfo make_encore() {
  // Other ways to hold the norm back that the authors' code tries out; their published settings switch them all off.
  using H = EncoreHparams;
  const std::string off = "off: this trial of the reference is not carried";
  static const auto schema =
      hparams::Schema<H>("encore")
          .include(memit_hparams_schema())
          .field("update_norm_lambda", &H::update_norm_lambda, "weight of the size of the change; 0 disables it",
                 {.formula = "dW = R Kt (lambda C + update_norm_lambda I + earlier + K Kt)^-1", .min = 0})
          .field("prob_cutoff", &H::prob_cutoff,
                 "-n: stop when the target was the most probable n times; p above 0: when its mean "
                 "probability exceeds p; 0 disables both",
                 {.min = -1e6, .max = 1})
          .field("add_prev_edits", &H::add_prev_edits, "whether keys of earlier batches are preserved")
          .field("norm_control", &H::norm_control, "not carried; must be 0")
          .field("use_gd", &H::use_gd, "not carried; must be false")
          .field("random_vector_preservation", &H::random_vector_preservation, "not carried; must be false")
          .unused("emmet_lambda", "belongs to EMMET")
          .unused("dynamic_multiplier", "belongs to norm_control")
          .unused("spectral_norm", "belongs to norm_control")
          .unused("condition_num", "belongs to norm_control")
          .unused("grad_desc_lr", "belongs to use_gd")
          .unused("grad_desc_steps", "belongs to use_gd")
          .unused("gd_lambda", "belongs to use_gd")
          .unused("calculate_norms", "a printout of the reference")
          .unused("calculate_objective_value", "a printout of the reference")
          .check("prob_cutoff", "a whole number below 0",
                 [](const H& h) { return h.prob_cutoff >= 0 || h.prob_cutoff == std::floor(h.prob_cutoff); })
          .check("norm_control", off, [](const H& h) { return h.norm_control == 0; })
          .check("use_gd", off, [](const H& h) { return !h.use_gd; })
          .check("random_vector_preservation", off, [](const H& h) { return !h.random_vector_preservation; });
  return locate_entry(
      "encore", "MEMIT for thousands of sequential edits: stops early and holds the norm back",
      "Gupta et al., Lifelong Sequential Knowledge Editing without Model Degradation, ACL Findings 2025", schema,
      encore_recipe);
}

}  // namespace emend::editors
