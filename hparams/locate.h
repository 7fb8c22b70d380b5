// Hyper-parameters shared by all editors that look a fact up at one token and rewrite MLP output matrices there
// (ROME, MEMIT and their descendants). Declared once: an editor derives from LocateHparams, includes locate_schema().
#pragma once

#include <emend/hparams/schema.h>

namespace emend::hparams {

/// Module paths as published files give them ("model.layers.{}.mlp.down_proj"). Empty where the file is silent. The
/// model checks them against its own structure; they never choose what is edited.
struct ModuleNames {
  std::string rewrite_module_tmp, layer_module_tmp, mlp_module_tmp, attn_module_tmp, ln_f_module, lm_head_module;
};
[[nodiscard]] const Schema<ModuleNames>& module_names_schema();  ///< the fields above

struct LocateHparams {
  std::vector<int64_t> layers;
  std::string fact_token = "subject_last";
  int64_t v_num_grad_steps = 25;
  double v_lr = 0.5;
  std::optional<int64_t> v_loss_layer;  ///< absent: the last block
  double v_weight_decay = 0.5;
  double clamp_norm_factor = 0.75;
  double kl_factor = 0.0625;
  double v_stop_loss = 0.05;
  bool mom2_adjustment = true;
  std::string mom2_dataset = "wikipedia";
  std::vector<std::vector<int64_t>> context_template_length_params = {{10, 5}};
  ModuleNames modules;
};
[[nodiscard]] const Schema<LocateHparams>& locate_schema();  ///< the fields above

/// A check of `layers`: each above the one before it. And what is expected of them.
[[nodiscard]] bool ascending(const std::vector<int64_t>& layers);
inline constexpr const char* kAscending = "different layers in ascending order";

}  // namespace emend::hparams
