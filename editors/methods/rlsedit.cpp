// RLSEdit: Beyond Hard Writes and Rigid Preservation: Soft Recursive Least-Squares for Lifelong LLM Editing (Wang et
// al., 2026, arXiv 2601.15686), section 3.
//
// After t batches the weight is the least-squares answer to all of them, anchored to the unedited weight W0 and to what
// it does with the corpus:
//
//   W_t = argmin Σ_i ‖W K_i − V_i‖² + λ²‖W − W0‖² + μ²·w·tr((W − W0) C (W − W0)ᵀ),   V_i = W_{i−1} K_i + R_i
//   W_t = W_{t−1} + R_t K_tᵀ (λ²I + μ²w·C + Σ_{i<t} K_iK_iᵀ + K_tK_tᵀ)⁻¹              the recursion
//
// The recursion keeps ΣKKᵀ instead of its inverse, so it costs the same however many batches there were, and loses no
// digits. Keys are remembered as each batch was solved with them.
//
//   F key width · N facts
#include <emend/editors/steps/locate.h>

namespace emend::editors {
namespace {

struct RlsHparams : MemitHparams {
  double lambda_reg = 0;
  double mu_reg = 1;
};

LocateRecipe rls_recipe(const RlsHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = shared_recipe(h, in);
  recipe.remembers_keys = recipe.keys_as_written = true;
  recipe.update = memit_update(h.mu_reg * h.mu_reg * h.mom2_update_weight, h.lambda_reg * h.lambda_reg);
  return recipe;
}

}  // namespace

EditorInfo make_rlsedit() {
  using H = RlsHparams;
  static const auto schema =
      hparams::Schema<H>("rlsedit")
          .include(memit_hparams_schema())
          .field("lambda_reg", &H::lambda_reg, "weight of the distance from the unedited weight",
                 {.formula = "λ² ‖W − W0‖²", .min = 0})
          .field("mu_reg", &H::mu_reg,
                 "weight of what the unedited weight does with the corpus, times mom2_update_weight",
                 {.formula = "μ² · w · tr((W − W0) C (W − W0)ᵀ)", .above = 0})
          .unused("nullspace_threshold", "belongs to AlphaEdit")
          .unused("L2", "belongs to AlphaEdit")
          .unused("weight_reg", "read by no code of the reference")
          .unused("solve_method", "a Cholesky factorisation in every case");
  return locate_entry(
      "rlsedit", "many batches as one least-squares problem, anchored to the unedited weights",
      "Wang et al., Beyond Hard Writes and Rigid Preservation: Soft Recursive Least-Squares for Lifelong LLM Editing, "
      "2026",
      schema, rls_recipe);
}

}  // namespace emend::editors
