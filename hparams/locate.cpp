#include <emend/hparams/locate.h>

#include <algorithm>

namespace emend::hparams {

bool ascending(const std::vector<int64_t>& layers) {
  return std::ranges::adjacent_find(layers, std::greater_equal<>()) == layers.end();
}

const Schema<ModuleNames>& module_names_schema() {
  using H = ModuleNames;
  static const auto schema =
      Schema<H>("module names")
          .field("rewrite_module_tmp", &H::rewrite_module_tmp,
                 "path of the rewritten matrix's module; checked against the model")
          .field("layer_module_tmp", &H::layer_module_tmp, "path of a block; checked against the model")
          .field("mlp_module_tmp", &H::mlp_module_tmp, "path of a block's MLP; checked against the model")
          .field("attn_module_tmp", &H::attn_module_tmp, "path of a block's attention; checked against the model")
          .field("ln_f_module", &H::ln_f_module, "path of the final norm; checked against the model")
          .field("lm_head_module", &H::lm_head_module, "path of the output head; checked against the model");
  return schema;
}

const Schema<LocateHparams>& locate_schema() {
  using H = LocateHparams;
  static const auto schema =
      Schema<H>("locate-then-edit")
          .field("layers", &H::layers, "blocks whose MLP output matrix is rewritten, counted from 0",
                 {.formula = "R", .required = true, .min = 0, .min_items = 1})
          .field("fact_token", &H::fact_token, "token at which the fact is looked up",
                 {.one_of = {"subject_last", "subject_first", "subject_first_after_last", "last"}})
          .field("v_num_grad_steps", &H::v_num_grad_steps,
                 "iterations of the target optimisation; the last one only measures, so there is one update fewer",
                 {.min = 1})
          .field("v_lr", &H::v_lr, "learning rate of Adam for the target", {.above = 0})
          .field("v_loss_layer", &H::v_loss_layer,
                 "block whose output is read by the final norm and head for the loss; none means the last", {.min = 0})
          .field("v_weight_decay", &H::v_weight_decay, "weight of the size of the change; 0 disables it",
                 {.formula = "times |d| / |t0|^2", .min = 0})
          .field("clamp_norm_factor", &H::clamp_norm_factor, "largest size of the change relative to the hidden state",
                 {.formula = "|d| <= factor |t0|", .above = 0})
          .field("kl_factor", &H::kl_factor, "weight of keeping what the model says about the subject; 0 disables it",
                 {.formula = "KL(edited, original) on \"{} is a\"", .min = 0})
          .field("v_stop_loss", &H::v_stop_loss, "loss below which the target optimisation stops early; 0 disables it",
                 {.min = 0})
          .field("mom2_adjustment", &H::mom2_adjustment,
                 "whether keys are weighted with the second moment of the corpus",
                 {.formula = "C = E[k kT]; C = I without"})
          .field("mom2_dataset", &H::mom2_dataset,
                 "name of the corpus of the second moment; the corpus of the run says which file that is")
          .field("context_template_length_params", &H::context_template_length_params,
                 "generated contexts before the prompt, as [length, how many] pairs, 5 or more each: they begin with "
                 "five words in turn",
                 {.min = 1})
          .include(module_names_schema(), &H::modules)
          .unused("layer_selection", "read by no implementation")
          .unused("mom2_n_samples", "stats_tokens of the run says how much of the corpus is read")
          .unused("mom2_dtype", "sums are float64")
          .check("layers", kAscending, [](const H& h) { return ascending(h.layers); })
          .check("context_template_length_params",
                 "pairs of length and number, the number 5 or more, such as [[5, 10], [10, 10]]", [](const H& h) {
                   return std::ranges::all_of(h.context_template_length_params,
                                              [](const auto& pair) { return pair.size() == 2 && pair[1] >= 5; });
                 });
  return schema;
}

}  // namespace emend::hparams
