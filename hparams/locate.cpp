#include <emend/hparams/locate.h>

namespace emend::hparams {

const Schema<ModuleNames>& module_names_schema() {
  static const auto schema = Schema<ModuleNames>("module names")
                                 .field("rewrite_module_tmp", &ModuleNames::rewrite_module_tmp,
                                        {.meaning = "path of the rewritten matrix's module; checked against the model"})
                                 .field("layer_module_tmp", &ModuleNames::layer_module_tmp,
                                        {.meaning = "path of a block; checked against the model"})
                                 .field("mlp_module_tmp", &ModuleNames::mlp_module_tmp,
                                        {.meaning = "path of a block's MLP; checked against the model"})
                                 .field("attn_module_tmp", &ModuleNames::attn_module_tmp,
                                        {.meaning = "path of a block's attention; checked against the model"})
                                 .field("ln_f_module", &ModuleNames::ln_f_module,
                                        {.meaning = "path of the final norm; checked against the model"})
                                 .field("lm_head_module", &ModuleNames::lm_head_module,
                                        {.meaning = "path of the output head; checked against the model"});
  return schema;
}

const Schema<LocateHparams>& locate_schema() {
  static const auto schema =
      Schema<LocateHparams>("locate-then-edit")
          .field("layers", &LocateHparams::layers,
                 {.meaning = "blocks whose MLP output matrix is rewritten, counted from 0",
                  .formula = "R",
                  .required = true,
                  .min = 0,
                  .min_items = 1})
          .field("fact_token", &LocateHparams::fact_token,
                 {.meaning = "token at which the fact is looked up",
                  .one_of = {"subject_last", "subject_first", "subject_first_after_last", "last"}})
          .field("v_num_grad_steps", &LocateHparams::v_num_grad_steps,
                 {.meaning =
                      "iterations of the target optimisation; the last one only measures, so there is one update fewer",
                  .min = 1})
          .field("v_lr", &LocateHparams::v_lr, {.meaning = "learning rate of Adam for the target", .above = 0})
          .field("v_loss_layer", &LocateHparams::v_loss_layer,
                 {.meaning = "block whose output is read by the final norm and head for the loss; none means the last",
                  .min = 0})
          .field(
              "v_weight_decay", &LocateHparams::v_weight_decay,
              {.meaning = "weight of the size of the change; 0 disables it", .formula = "times |d| / |t0|^2", .min = 0})
          .field("clamp_norm_factor", &LocateHparams::clamp_norm_factor,
                 {.meaning = "largest size of the change relative to the hidden state",
                  .formula = "|d| <= factor |t0|",
                  .above = 0})
          .field("kl_factor", &LocateHparams::kl_factor,
                 {.meaning = "weight of keeping what the model says about the subject; 0 disables it",
                  .formula = "KL(edited, original) on \"{} is a\"",
                  .min = 0})
          .field("v_stop_loss", &LocateHparams::v_stop_loss,
                 {.meaning = "loss below which the target optimisation stops early; 0 disables it", .min = 0})
          .field("mom2_adjustment", &LocateHparams::mom2_adjustment,
                 {.meaning = "whether keys are weighted with the second moment of the corpus",
                  .formula = "C = E[k kT]; C = I without"})
          .field("mom2_dataset", &LocateHparams::mom2_dataset,
                 {.meaning = "name of the corpus of the second moment; the corpus of the run says which file that is"})
          .field("mom2_n_samples", &LocateHparams::mom2_n_samples,
                 {.meaning = "documents of the corpus that are read at most; stats_tokens of the run limits the tokens",
                  .min = 1})
          .field("mom2_dtype", &LocateHparams::mom2_dtype,
                 {.meaning = "precision in which the second moment is summed",
                  .one_of = {"float32", "float64", "float16", "bfloat16"}})
          .field("context_template_length_params", &LocateHparams::context_template_length_params,
                 {.meaning = "generated contexts before the prompt, as [length, how many] pairs", .min = 1})
          .include(module_names_schema(), &LocateHparams::modules)
          .unused("layer_selection", "read by no implementation")
          .check("layers",
                 [](const LocateHparams& h) -> std::string {
                   for (size_t i = 1; i < h.layers.size(); ++i)
                     if (h.layers[i] <= h.layers[i - 1]) return "different layers in ascending order";
                   return "";
                 })
          .check("context_template_length_params", [](const LocateHparams& h) -> std::string {
            for (const auto& pair : h.context_template_length_params)
              if (pair.size() != 2) return "pairs of length and number, such as [[5, 10], [10, 10]]";
            return "";
          });
  return schema;
}

}  // namespace emend::hparams
