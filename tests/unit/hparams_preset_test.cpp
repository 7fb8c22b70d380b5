// Every shipped preset loads with its editor's own schema, fits its model and is found for it.
#include <emend/core/error.h>
#include <emend/editors/registry.h>
#include <emend/hparams/machine.h>
#include <emend/hparams/preset.h>
#include <gtest/gtest.h>

#include <set>

#include "support/error_of.h"

namespace emend::hparams {
namespace hparams_preset_test {

std::string found_name(const std::string& editor, const std::string& name, const std::string& family = "",
                       int64_t layers = 0, int64_t hidden = 0, int64_t mlp = 0) {
  const Preset* preset = find_preset(editor, {{name}, family, layers, hidden, mlp});
  return preset ? preset->name : "";
}

TEST(HparamsPreset, EveryPresetLoads) {
  ASSERT_GT(all_presets().size(), 150U);
  std::set<std::pair<std::string, std::string>> names;
  for (const Preset& preset : all_presets()) {
    SCOPED_TRACE(preset.path + ": " + preset.name);
    EXPECT_TRUE(names.emplace(preset.editor, preset.name).second);
    EXPECT_FALSE(preset.source.empty());
    EXPECT_TRUE(std::ranges::all_of(preset.values.entries(), &RawEntry::bundled));
    const RawValue* variant_of = preset.values.find("preset")->value.find("variant_of");
    EXPECT_NE(preset.model.has_value(), variant_of != nullptr) << "a preset is for a model or a variant of one that is";
    if (variant_of) {
      EXPECT_NE(find_preset_by_name(preset.editor, variant_of->text), nullptr);
    }
    const bool tuning = preset.editor == "lora" || preset.editor.starts_with("ft");
    for (const RawEntry& entry :
         preset.values.entries())  // facts of a step are a method's own where it trains in steps
      EXPECT_FALSE(is_machine_key(entry.key) && !(tuning && entry.key == "batch_size")) << entry.key;
    nlohmann::json h;
    ASSERT_NO_THROW(h = editors::find_editor(preset.editor).effective(preset.values, {}));
    if (!preset.model || preset.model->layers == 0) continue;
    for (const int64_t layer : h.value("layers", std::vector<int64_t>())) EXPECT_LT(layer, preset.model->layers);
    if (h.contains("v_loss_layer")) {
      EXPECT_LT(h["v_loss_layer"].get<int64_t>(), preset.model->layers);
    }
  }
  for (const auto& editor : editors::all_editors())
    EXPECT_EQ(found_name(editor.name, "HuggingFaceTB/SmolLM2-135M", "llama", 30, 576), "smollm2-135m") << editor.name;
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
  testing::expect_refused([] { (void)load_file_or_preset("rome", "gpt2-xll"); }, ErrorClass::kNotFound,
                          {"did you mean \"gpt2-xl\"?"}, 2000);
}

}  // namespace hparams_preset_test
}  // namespace emend::hparams
