// Every shipped preset loads, holds only keys that its editor's published files have, and is found for its model.
#include <emend/core/error.h>
#include <emend/hparams/locate.h>
#include <emend/hparams/machine.h>
#include <emend/hparams/preset.h>
#include <gtest/gtest.h>

#include <set>

namespace emend::hparams {
namespace hparams_preset_test {

const Preset* found(const std::string& editor, const std::string& name, const std::string& family = "",
                    int64_t layers = 0, int64_t hidden = 0, int64_t mlp = 0) {
  return find_preset(editor, {{name}, family, layers, hidden, mlp});
}
std::string found_name(const std::string& editor, const std::string& name, const std::string& family = "",
                       int64_t layers = 0, int64_t hidden = 0, int64_t mlp = 0) {
  const Preset* preset = found(editor, name, family, layers, hidden, mlp);
  return preset ? preset->name : "";
}

/// All locate-then-edit keys with every key that some method adds.
struct AnyLocate : LocateHparams {
  double mom2_update_weight = 0, update_norm_lambda = 0, emmet_lambda = 0, nll_loss_factor = 0, nullspace_threshold = 0,
         L2 = 0;
  double cumulative_ratio = 0, suppression_strength = 0, alpha = 0, upper_bound = 0, neuron_threshold = 0,
         prob_cutoff = 0, k_percent = 0, round_probability = 0;
  int64_t max_iterations = 0, rounds = 1;
  bool enable_prompt_keys = false, enable_random_prefix_keys = false, original_implementation = false,
       merge_equal_keys = false;
};
const Schema<AnyLocate>& any_locate() {
  static const auto schema = [] {
    Schema<AnyLocate> s("any");
    s.include(locate_schema());
    const std::vector<std::pair<const char*, double AnyLocate::*>> numbers = {
        {"mom2_update_weight", &AnyLocate::mom2_update_weight},
        {"update_norm_lambda", &AnyLocate::update_norm_lambda},
        {"emmet_lambda", &AnyLocate::emmet_lambda},
        {"nll_loss_factor", &AnyLocate::nll_loss_factor},
        {"nullspace_threshold", &AnyLocate::nullspace_threshold},
        {"L2", &AnyLocate::L2},
        {"cumulative_ratio", &AnyLocate::cumulative_ratio},
        {"suppression_strength", &AnyLocate::suppression_strength},
        {"alpha", &AnyLocate::alpha},
        {"upper_bound", &AnyLocate::upper_bound},
        {"neuron_threshold", &AnyLocate::neuron_threshold},
        {"prob_cutoff", &AnyLocate::prob_cutoff},
        {"k_percent", &AnyLocate::k_percent},
        {"round_probability", &AnyLocate::round_probability}};
    for (const auto& [name, member] : numbers) s.field(name, member, {.meaning = name});
    s.field("max_iterations", &AnyLocate::max_iterations, {.meaning = "n"});
    s.field("rounds", &AnyLocate::rounds, {.meaning = "n"});
    s.field("enable_prompt_keys", &AnyLocate::enable_prompt_keys, {.meaning = "n"});
    s.field("enable_random_prefix_keys", &AnyLocate::enable_random_prefix_keys, {.meaning = "n"});
    s.field("original_implementation", &AnyLocate::original_implementation, {.meaning = "n"});
    s.field("merge_equal_keys", &AnyLocate::merge_equal_keys, {.meaning = "n"});
    return s;
  }();
  return schema;
}

struct AnyTuning {
  std::vector<int64_t> layers;
  int64_t num_steps = 25, rank = 8, lora_alpha = 32;
  double lr = 0, weight_decay = 0, lora_dropout = 0;
  std::optional<double> norm_constraint;
  std::string objective_optimization = "prompt_last", rewrite_module_tmp, lora_type = "lora";
  std::vector<std::string> target_modules;
};
const Schema<AnyTuning>& any_tuning() {
  static const auto schema =
      Schema<AnyTuning>("tuning")
          .field("layers", &AnyTuning::layers, {.meaning = "n", .min = 0})
          .field("num_steps", &AnyTuning::num_steps, {.meaning = "n", .min = 1})
          .field("rank", &AnyTuning::rank, {.meaning = "n", .min = 1})
          .field("lora_alpha", &AnyTuning::lora_alpha, {.meaning = "n", .min = 1})
          .field("lr", &AnyTuning::lr, {.meaning = "n", .required = true, .above = 0})
          .field("weight_decay", &AnyTuning::weight_decay, {.meaning = "n", .min = 0})
          .field("lora_dropout", &AnyTuning::lora_dropout, {.meaning = "n", .min = 0, .max = 1})
          .field("norm_constraint", &AnyTuning::norm_constraint, {.meaning = "n", .above = 0})
          .field("objective_optimization", &AnyTuning::objective_optimization,
                 {.meaning = "n", .one_of = {"prompt_last", "target_new"}})
          .field("rewrite_module_tmp", &AnyTuning::rewrite_module_tmp, {.meaning = "n"})
          .field("lora_type", &AnyTuning::lora_type, {.meaning = "n", .one_of = {"lora", "adalora"}})
          .field("target_modules", &AnyTuning::target_modules, {.meaning = "n"});
  return schema;
}

TEST(HparamsPreset, EveryPresetLoads) {
  ASSERT_GT(all_presets().size(), 150U);
  std::set<std::pair<std::string, std::string>> names;
  std::set<std::string> editors;
  for (const Preset& preset : all_presets()) {
    SCOPED_TRACE(preset.path + ": " + preset.name);
    EXPECT_TRUE(names.emplace(preset.editor, preset.name).second);
    editors.insert(preset.editor);
    EXPECT_FALSE(preset.source.empty());
    const RawHparams raw = preset.values;
    const std::string variant_of = [&] {
      const RawValue* value = raw.find("preset")->value.find("variant_of");
      return value ? value->text : std::string();
    }();
    EXPECT_NE(preset.model.has_value(), !variant_of.empty()) << "a preset is for a model or a variant of one that is";
    if (!variant_of.empty()) {
      EXPECT_NE(find_preset_by_name(preset.editor, variant_of), nullptr);
    }
    const bool tuning = preset.editor == "lora" || preset.editor.rfind("ft", 0) == 0;
    for (const RawEntry& entry : raw.entries())  // facts of a step are a method's own where it is trained in steps
      EXPECT_FALSE(is_machine_key(entry.key) && !(tuning && entry.key == "batch_size")) << entry.key;
    // Editors with other fields: hparams_editors_test reads their presets with their own schemas.
    static const std::set<std::string> apart = {"anyedit", "ft-w",    "ultraedit", "grace",     "wise",
                                                "ike",     "rlsedit", "neuraldb",  "crispedit", "eamet",
                                                "core",    "unke",    "latch"};
    if (apart.contains(preset.editor)) continue;
    if (tuning) {
      EXPECT_NO_THROW((void)any_tuning().parse(raw));
      continue;
    }
    AnyLocate h;
    ASSERT_NO_THROW(h = any_locate().parse(raw));
    if (preset.model && preset.model->layers > 0) {
      EXPECT_LT(h.layers.back(), preset.model->layers);
      EXPECT_LT(h.v_loss_layer.value(), preset.model->layers);
    }
  }
  for (const char* editor :
       {"rome",     "r-rome",   "memit",     "emmet",     "pmet", "alphaedit", "nse",     "sphere",
        "encore",   "rect",     "prune",     "memit-seq", "ft",   "ft-l",      "ft-m",    "lora",
        "anyedit",  "ft-w",     "ultraedit", "grace",     "wise", "ike",       "rlsedit", "memit-fe",
        "lyaplock", "neuraldb", "crispedit", "eamet",     "core", "unke",      "latch"}) {
    EXPECT_TRUE(editors.contains(editor)) << editor;
    EXPECT_EQ(found_name(editor, "HuggingFaceTB/SmolLM2-135M", "llama", 30, 576), "smollm2-135m") << editor;
  }
}

TEST(HparamsPreset, PublishedFigures) {  // a few rows of the published tables, typed here a second time
  const auto memit = [](const char* name) { return any_locate().parse(find_preset_by_name("memit", name)->values); };
  EXPECT_EQ(memit("gpt2-xl").layers, (std::vector<int64_t>{13, 14, 15, 16, 17}));
  EXPECT_EQ(memit("gpt2-xl").v_num_grad_steps, 20);
  EXPECT_EQ(memit("gpt2-xl").mom2_update_weight, 20000);
  EXPECT_EQ(memit("gpt-j-6b").layers, (std::vector<int64_t>{3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(memit("gpt-j-6b").mom2_update_weight, 15000);
  EXPECT_EQ(memit("llama3-8b").v_lr, 0.1);
  EXPECT_EQ(memit("llama-7b").v_weight_decay, 1e-3);
  EXPECT_EQ(memit("llama-7b").clamp_norm_factor, 4);
  EXPECT_EQ(memit("gpt-neox-20b").clamp_norm_factor, 0.3);
  const auto rome = [](const char* name) { return any_locate().parse(find_preset_by_name("rome", name)->values); };
  EXPECT_TRUE(rome("gpt2-xl").mom2_adjustment);
  EXPECT_FALSE(rome("gpt2-xl-easyedit").mom2_adjustment);
  EXPECT_EQ(rome("gpt2-medium").clamp_norm_factor, 3);
  EXPECT_EQ(rome("gpt2-medium").layers, (std::vector<int64_t>{8}));
}

TEST(HparamsPreset, FoundByName) {
  EXPECT_EQ(found_name("memit", "./hugging_cache/gpt2-xl"), "gpt2-xl");
  EXPECT_EQ(found_name("memit", "/models/models--EleutherAI--gpt-j-6B/snapshots/abc"), "gpt-j-6b");
  EXPECT_EQ(found_name("memit", "meta-llama/Llama-2-7b-hf"), "llama-7b");
  EXPECT_EQ(found_name("memit", "meta-llama/Meta-Llama-3-8B-Instruct"), "llama3-8b");
  EXPECT_EQ(found_name("alphaedit", "meta-llama/Llama-3.1-8B"), "llama3.1-8b");
  EXPECT_EQ(found_name("memit", "Qwen/Qwen2.5-7B-Instruct"), "qwen2.5-7b");
  EXPECT_EQ(found_name("memit", "Qwen/Qwen-7B-Chat"), "qwen-7b");
  EXPECT_EQ(found_name("MEMIT_seq", "gpt2-xl"), "gpt2-xl");
  EXPECT_EQ(found_name("memit", "gpt2-xl2"), "");
  EXPECT_EQ(found_name("memit", "gpt2"), "");
  EXPECT_EQ(found_name("no-such-editor", "gpt2-xl"), "");
}

TEST(HparamsPreset, StructureConfirmsOrReplacesTheName) {
  EXPECT_EQ(found_name("memit", "models/gpt2-xl", "gpt2", 12, 768), "") << "a small model in a folder of that name";
  EXPECT_EQ(found_name("memit", "models/mine", "gpt2", 48, 1600), "gpt2-xl");
  EXPECT_EQ(found_name("memit", "models/mine", "gpt2", 48, 0), "");
  EXPECT_EQ(found_name("memit", "models/mine", "llama", 32, 4096, 11008), "llama-7b");
  EXPECT_EQ(found_name("memit", "models/mine", "llama", 32, 4096, 14336), "llama3-8b");
  EXPECT_EQ(found_name("memit", "llama-2-7b", "llama", 32, 4096, 14336), "llama3-8b")
      << "the name contradicts the structure";
  EXPECT_EQ(found_name("memit", "x", "llama", 30, 576), "smollm2-135m");
}

TEST(HparamsPreset, VariantsOnlyByName) {
  EXPECT_EQ(found_name("rome", "gpt2-xl-easyedit"), "gpt2-xl");
  EXPECT_NE(find_preset_by_name("rome", "gpt2-xl-easyedit"), nullptr);
  EXPECT_EQ(find_preset_by_name("rome", "memit/gpt2-xl")->editor, "memit");
  EXPECT_EQ(load_file_or_preset("rome", "gpt2-xl-easyedit").where("layers"), "hparams/rome.yaml:69");
  try {
    (void)load_file_or_preset("rome", "gpt2-xll");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.error_class(), ErrorClass::kNotFound);
    EXPECT_NE(std::string(error.what()).find("did you mean \"gpt2-xl\"?"), std::string::npos) << error.what();
  }
}

}  // namespace hparams_preset_test
}  // namespace emend::hparams
