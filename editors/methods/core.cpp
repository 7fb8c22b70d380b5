// CoRE: Context-Robust Knowledge Editing for Language Models (Findings of ACL 2025), as EasyEdit has it.
//
// MEMIT whose targets are to mean the same in every context. h_j: what the looked-up token of context row j holds at
// the output of a layer above the rewritten ones; the loss of a target gains
//   reg_lambda · (1/L) Σ_l (1/D) Σ_{i<j} ‖h_i − h_j‖² over the `layer_range` layers l above the last rewritten one
//
//   L layers · J rows · D hidden width
#include <ATen/ATen.h>
#include <emend/editors/steps/locate.h>

#include <algorithm>

namespace emend::editors {
namespace {

struct CoreHparams : MemitHparams {
  double reg_lambda = 0;
  int64_t layer_range = 0;
};

// Σ_{i<j} ‖h_i − h_j‖² = J Σ_i ‖h_i − mean‖²
at::Tensor disagreement(const at::Tensor& states_LJD) {
  const at::Tensor away = states_LJD - states_LJD.mean(1, /*keepdim=*/true);
  return away.square().sum() *
         (static_cast<double>(states_LJD.size(1)) / static_cast<double>(states_LJD.size(0) * states_LJD.size(2)));
}

LocateRecipe core_recipe(const CoreHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = memit_recipe(h, in);
  TargetSpec& targets = recipe.targets;
  const int last = std::min<int>(targets.loss_layer.value_or(in.model.n_layers() - 1),
                                 targets.sites[0].layer + static_cast<int>(h.layer_range));
  for (int layer = targets.sites[0].layer + 1; h.reg_lambda > 0 && layer <= last; ++layer)
    targets.watched_layers.push_back(layer);
  if (h.reg_lambda > 0 && targets.watched_layers.empty())
    refuse({in.raw.where(h.layer_range == 0 ? "layer_range" : "layers"),
            "reg_lambda with no layer above the last rewritten one to compare states in",
            "a layer_range of at least 1, and layers below the one that is read for the loss", "or reg_lambda 0"});
  targets.watched_loss = [weight = h.reg_lambda](const at::Tensor& states_LJD) {
    return disagreement(states_LJD) * weight;
  };
  return recipe;
}

}  // namespace

EditorInfo make_core() {
  using H = CoreHparams;
  static const auto schema =
      hparams::Schema<H>("core")
          .include(memit_hparams_schema())
          .field("reg_lambda", &H::reg_lambda,
                 "weight of how far a fact's state differs from context to context; 0 disables it",
                 {.formula = "times mean over layers of sum |hi - hj|^2 / D, i < j", .min = 0})
          .field("layer_range", &H::layer_range, "layers above the last rewritten one whose states are compared",
                 {.min = 0, .max = 10000})
          .unused("context", "contexts that begin with a fact's own words are not carried: give contexts as an input")
          .unused("ctx_num", "context_template_length_params says how many")
          .unused("ctx_len", "context_template_length_params says how long")
          .unused("ctx_top_k", "contexts are sampled as for all editors")
          .unused("lambda_", "read by no implementation");
  return locate_entry("core", "MEMIT whose facts mean the same whatever stands before them",
                      "Context-Robust Knowledge Editing for Language Models, Findings of ACL 2025", schema,
                      core_recipe);
}

}  // namespace emend::editors
