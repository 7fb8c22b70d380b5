// Every registered editor accepts files of the form that EasyEdit, the MEMIT repository and its descendants publish.
// The files below are written here with the published keys.
#include <emend/core/error.h>
#include <emend/editors/registry.h>
#include <gtest/gtest.h>

namespace emend::editors {
namespace hparams_editors_test {

const std::string kModules = R"(rewrite_module_tmp: "model.layers.{}.mlp.down_proj"
layer_module_tmp: "model.layers.{}"
mlp_module_tmp: "model.layers.{}.mlp"
attn_module_tmp: "model.layers.{}.self_attn"
ln_f_module: "model.norm"
lm_head_module: "lm_head"
)";
const std::string kMachine = R"(model_name: "./hugging_cache/llama-2-7b"
device: 0
)";
const std::string kLocate = R"(stats_dir: "./data/stats"
layers: [4, 5, 6, 7, 8]
clamp_norm_factor: 4
layer_selection: "all"
fact_token: "subject_last"
v_num_grad_steps: 25
v_lr: 5e-1
v_loss_layer: 31
v_weight_decay: 1e-3
kl_factor: 0.0625
mom2_adjustment: true
mom2_update_weight: 15000
mom2_dataset: "wikipedia"
mom2_n_samples: 100000
mom2_dtype: "float32"
)" + kModules;
const std::string kRome = R"(stats_dir: "./data/stats"
layers: [5]
fact_token: "subject_last"
v_num_grad_steps: 25
v_lr: 5e-1
v_loss_layer: 31
v_weight_decay: 1e-3
clamp_norm_factor: 4
kl_factor: 0.0625
mom2_adjustment: false
context_template_length_params: [[5, 10], [10, 10]]
mom2_dataset: "wikipedia"
mom2_n_samples: 100000
mom2_dtype: "float32"
model_parallel: false
fp16: true
)" + kModules;
const std::string kTuning = R"(num_steps: 25
batch_size: 1
max_length: 40
lr: 5e-4
weight_decay: 0
kl_factor: 0
model_parallel: false
)";

struct Published {
  const char* editor;
  std::string text;
};

std::vector<Published> published_yaml() {
  const std::string ft = "alg_name: \"FT\"\n" + kMachine +
                         "layers: [21]\nnorm_constraint: false\nobjective_optimization: \"prompt_last\"\n" + kTuning +
                         kModules;
  const std::string ft_constrained =
      "alg_name: \"FT\"\n" + kMachine +
      "layers: [0, 31]\nnorm_constraint: 5e-4\nobjective_optimization: \"target_new\"\n" + kTuning + kModules;
  const std::string lora = R"(lora_type: "adalora"
layers: []
rank: 8
lora_alpha: 32
lora_dropout: 0.1
norm_constraint: false
target_modules: ["q_proj", "v_proj"]  #["up_proj", "down_proj"]
)";
  std::string crisp = "alg_name: \"CrispEdit\"\n" + kMachine +
                      "layers: [19, 20, 21, 22, 23]\nnum_steps: 25\nbatch_size: 32\nlr: 5e-4\nweight_decay: 0\n"
                      "kl_factor: 0\nnorm_constraint: false\nobjective_optimization: \"target_new\"\n" +
                      kModules + "mom2_dataset: \"wikipedia\"\nmom2_n_samples: 1000\nmom2_dtype: \"float32\"\n" +
                      "energy_threshold: 0.99\n";
  return {
      {"crispedit", crisp},
      {"rome", "alg_name: \"ROME\"\n" + kMachine + kRome + "max_length: 40\n"},
      {"r-rome", "alg_name: \"R-ROME\"\n" + kMachine + kRome},
      {"r-rome", "alg_name: \"R-ROME\"\n" + kMachine + kRome +
                     "enable_prompt_keys: false\nenable_random_prefix_keys: true\noriginal_implementation: false\n"},
      {"memit", "alg_name: \"MEMIT\"\n" + kMachine + kLocate + "model_parallel: false"},
      {"emmet", "alg_name: \"EMMET\"\n" + kMachine + kLocate +
                    "update_norm_lambda: 0\nemmet_lambda: 0.1\nmodel_parallel: false\n"},
      {"pmet",
       "alg_name: \"PMET\"\n" + kMachine + kLocate +
           "rewrite_module_tmps: [\"model.layers.{}.mlp.down_proj\"]\nnll_loss_factor: 1\nmodel_parallel: false\n"},
      {"alphaedit", "alg_name: \"AlphaEdit\"\n" + kMachine + kLocate +
                        "P_loc: \"./null_space_project.pt\"\nnullspace_threshold: 2e-2\nL2: 10\n"},
      {"sphere", "alg_name: \"SPHERE\"\n" + kMachine + kLocate +
                     "P_loc: \"./null_space_project.pt\"\nnullspace_threshold: 2e-2\nL2: 1\ncumulative_ratio: "
                     "0.5\nsuppression strength: 0.5\n"},
      {"ft", ft},
      {"ft", ft_constrained},
      {"ft-l", ft},
      {"ft-l", ft_constrained},
      {"ft-m", ft_constrained},
      {"lora", "alg_name: \"LoRA\"\n" + kMachine + lora + kTuning},
  };
}

std::vector<Published> published_json() {
  const nlohmann::json modules = {{"rewrite_module_tmp", "model.layers.{}.mlp.down_proj"},
                                  {"layer_module_tmp", "model.layers.{}"},
                                  {"mlp_module_tmp", "model.layers.{}.mlp"},
                                  {"attn_module_tmp", "model.layers.{}.self_attn"},
                                  {"ln_f_module", "model.norm"},
                                  {"lm_head_module", "lm_head"}};
  nlohmann::json memit = {{"layers", {4, 5}},
                          {"clamp_norm_factor", 0.75},
                          {"layer_selection", "all"},
                          {"fact_token", "subject_last"},
                          {"v_num_grad_steps", 25},
                          {"v_lr", 0.5},
                          {"v_loss_layer", 31},
                          {"v_weight_decay", 0.5},
                          {"kl_factor", 0.0625},
                          {"mom2_adjustment", true},
                          {"mom2_update_weight", 15000},
                          {"mom2_dataset", "wikipedia"},
                          {"mom2_n_samples", 100000},
                          {"mom2_dtype", "float32"}};
  memit.update(modules);
  nlohmann::json rome = memit;
  for (const char* key : {"layer_selection", "mom2_update_weight"}) rome.erase(key);
  rome["context_template_length_params"] = {{5, 10}, {10, 10}};
  rome["layers"] = {5};
  nlohmann::json tuning = {{"layers", {21}},    {"num_steps", 25}, {"lr", 5e-4},
                           {"weight_decay", 0}, {"kl_factor", 0},  {"norm_constraint", false}};
  tuning.update(modules);
  nlohmann::json constrained = tuning;
  constrained["norm_constraint"] = 5e-5;
  nlohmann::json decayed = tuning;
  decayed["weight_decay"] = false;
  decayed["wd_power_law"] = {-0.87028798, 0.15589562};
  nlohmann::json unke = {{"model_name", "Llama3-8B-Instruct"},
                         {"layers", {7}},
                         {"clamp_norm_factor", 4},
                         {"layer_selection", "all"},
                         {"fact_token", "last"},
                         {"lr", 2e-4},
                         {"v_num_grad_steps", 25},
                         {"v_lr", 0.5},
                         {"v_loss_layer", 31},
                         {"v_weight_decay", 1e-3},
                         {"optim_num_step", 50},
                         {"ex_data_num", 20}};
  unke.update(modules);
  const auto with = [](nlohmann::json base, const nlohmann::json& more) {
    base.update(more);
    return base.dump(4);
  };
  const nlohmann::json named = {{"model_name", "Llama3-8B"}};
  return {
      {"rome", rome.dump(4)},
      {"r-rome", rome.dump(4)},
      {"memit", memit.dump(4)},
      {"memit", with(memit, named)},
      {"memit-seq", with(memit, named)},
      {"rlsedit", with(memit, {{"nullspace_threshold", 0.02},
                               {"L2", 4},
                               {"lambda_reg", 0},
                               {"mu_reg", 1.0},
                               {"weight_reg", 1},
                               {"solve_method", "qr"}})},
      {"memit-fe", with(memit, {{"clamp_norm_factor", 4}})},
      {"unke", unke.dump(4)},
      {"core", with(memit, {{"context", "all"},
                            {"ctx_num", 5},
                            {"ctx_len", 10},
                            {"ctx_top_k", 5},
                            {"reg_lambda", 1},
                            {"layer_range", 3}})},
      {"eamet", with(memit, {{"mom2_update_weight", {15000, 15000}},
                             {"ks_bs", 1},
                             {"clamp_ks_factor", 1},
                             {"cs_factor", 1},
                             {"mse_factor", 1},
                             {"tau", 0.07},
                             {"norm_factor", 1e-3},
                             {"delta_init", "target_init"},
                             {"weight_decay_method", "norm"}})},
      {"lyaplock", with(memit, {{"model_name", "Llama3-8B"}, {"mom2_dtype", "float64"}})},
      {"rect", with(memit, named)},
      {"prune", with(memit, named)},
      {"emmet", with(memit, {{"calculate_objective_value", false}, {"update_norm_lambda", 0}, {"emmet_lambda", 0.1}})},
      {"pmet", with(memit, {{"rewrite_module_tmps", {"model.layers.{}.mlp.down_proj"}}, {"nll_loss_factor", 1}})},
      {"alphaedit", with(memit, {{"model_name", "Llama3-8B"}, {"nullspace_threshold", 0.02}, {"L2", 10}})},
      {"nse", with(memit, {{"model_name", "Llama3-8B"},
                           {"alpha", 2.5},
                           {"upper_bound", 50},
                           {"max_iterations", 3},
                           {"neuron_threshold", 1.0}})},
      {"encore", with(memit, {{"calculate_objective_value", false},
                              {"add_prev_edits", true},
                              {"update_norm_lambda", 10},
                              {"emmet_lambda", 0.1},
                              {"prob_cutoff", -4},
                              {"norm_control", 0},
                              {"use_gd", false},
                              {"dynamic_multiplier", 5},
                              {"random_vector_preservation", false},
                              {"grad_desc_lr", 0.005},
                              {"grad_desc_steps", 100},
                              {"gd_lambda", 50},
                              {"spectral_norm", 2},
                              {"condition_num", 50},
                              {"calculate_norms", false}})},
      {"ft", tuning.dump(4)},
      {"ft", decayed.dump(4)},
      {"ft-l", constrained.dump(4)},
  };
}

void expect_accepted(const std::vector<Published>& files, const std::string& source) {
  for (const Published& file : files) {
    const EditorInfo& editor = find_editor(file.editor);
    SCOPED_TRACE(std::string(file.editor) + ":\n" + file.text);
    try {
      const nlohmann::json values = editor.effective(hparams::parse_hparams(file.text, source), {});
      EXPECT_TRUE(values.contains("layers") || editor.name == "lora");
      // The dump of a report is a file that gives the same values again.
      EXPECT_EQ(editor.effective(hparams::parse_hparams(values.dump(), "dump.json"), {}), values);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

TEST(HparamsEditors, EasyEditFilesAsTheyAre) {
  expect_accepted(published_yaml(), "easyedit.yaml");
}

TEST(HparamsEditors, RepositoryFilesAsTheyAre) {
  expect_accepted(published_json(), "repository.json");
}

TEST(HparamsEditors, MisspeltKeysAreRefusedByAll) {
  for (const EditorInfo& editor : all_editors())
    EXPECT_THROW((void)editor.effective(hparams::parse_hparams("layers: [1]\nno_such_key_at_all: 1\n", "x.yaml"), {}),
                 Error)
        << editor.name;
}

}  // namespace hparams_editors_test
}  // namespace emend::editors
