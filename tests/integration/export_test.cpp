// `emend export`: what other programs load gives what emend computes with the pack.
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/safetensors.h>
#include <emend/models/batch.h>
#include <emend/models/checkpoint.h>
#include <emend/models/gguf/gguf_file.h>
#include <emend/models/gguf/gguf_lora.h>
#include <emend/models/gguf/gguf_writer.h>
#include <emend/models/model.h>
#include <gtest/gtest.h>

#include "support/debug_models.h"
#include "support/program_fixture.h"
#include "support/tiny_tokenizer.h"

namespace emend::testing {
namespace export_test {

using nlohmann::json;

// A tensor of the file, rows first.
at::Tensor tensor_of(const models::GgufFile& file, const std::string& name) {
  for (const auto& tensor : file.tensors())
    if (tensor.name == name)
      return at::from_blob(const_cast<std::byte*>(file.data(tensor)), tensor.shape, at::kFloat).clone();
  ADD_FAILURE() << "no tensor " << name;
  return {};
}

class ExportTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    must_run("memit_edit", edit({"--save", "pack,model", "--eval", "none", "--quiet"}));
  }
  [[nodiscard]] ProgramResult export_to(const std::string& form, const std::string& out,
                                        std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {
        "export", path("run/edit.safetensors"), "--model", path("model"), "--to", form, "--out", path(out), "--quiet",
        "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program("emend", arguments);
  }
};

TEST_F(ExportTest, AllFormsHoldTheEditedWeights) {
  const std::string name = "model.layers.1.mlp.down_proj.weight";
  const at::Tensor base = models::open_checkpoint(path("model"))->read(name),
                   edited = models::open_checkpoint(path("run/model"))->read(name);
  ASSERT_GT((edited - base).abs().max().item<double>(), 0);
  auto result = export_to("model", "m");
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_TRUE(at::equal(models::open_checkpoint(path("m"))->read(name), edited));
  result = export_to("gguf", "m.gguf");
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_TRUE(at::equal(models::open_checkpoint(path("m.gguf"))->read(name), edited));
  result = export_to("lora", "lora.gguf");
  ASSERT_EQ(result.status, 0) << result.err;
  const models::GgufFile lora(folder_ / "lora.gguf");
  EXPECT_EQ(lora.required_text("general.type"), "adapter");
  EXPECT_EQ(lora.required_text("adapter.type"), "lora");
  EXPECT_EQ(lora.required_text("general.architecture"), "llama");
  const at::Tensor a = tensor_of(lora, "blk.1.ffn_down.weight.lora_a"),
                   b = tensor_of(lora, "blk.1.ffn_down.weight.lora_b");
  EXPECT_LT((base + b.mm(a) - edited).abs().max().item<double>(), 1e-5);
  result = export_to("peft", "adapter");
  ASSERT_EQ(result.status, 0) << result.err;
  const SafetensorsFile adapter(folder_ / "adapter" / "adapter_model.safetensors");
  EXPECT_TRUE(adapter.contains("base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"));
}

// --dtype says how it is computed; a file is as exact as the model's.
TEST_F(ExportTest, ANarrowerDtypeLosesNothingOfTheFile) {
  ASSERT_EQ(export_to("gguf", "exact.gguf").status, 0);
  ASSERT_EQ(export_to("gguf", "narrow.gguf", {"--dtype", "bfloat16"}).status, 0);
  EXPECT_TRUE(read_file(folder_ / "exact.gguf") == read_file(folder_ / "narrow.gguf"));
  ASSERT_EQ(export_to("gguf", "split.gguf", {"--dtype", "bfloat16", "--device-map", "sim:2"}).status, 0);
  EXPECT_TRUE(read_file(folder_ / "exact.gguf") == read_file(folder_ / "split.gguf"));
  must_run("emend", {"convert", path("model"), path("base.gguf")});
  const auto folder = [&](const std::string& out, const std::string& dtype) {
    return run_program("emend", {"export", path("run/edit.safetensors"), "--model", path("base.gguf"), "--to", "model",
                                 "--out", path(out), "--dtype", dtype, "--force", "--quiet"});
  };
  ASSERT_EQ(folder("exact", "float32").status, 0);
  ASSERT_EQ(folder("narrow", "bfloat16").status, 0);
  EXPECT_TRUE(model_bytes("exact") == model_bytes("narrow"));
}

TEST_F(ExportTest, ABaseWithEditsIsRefused) {
  ASSERT_EQ(export_to("gguf", "edited.gguf").status, 0);
  expect_ended(export_to("gguf", "twice.gguf", {"--base", path("edited.gguf")}), 2, {"a file that holds edits"});
  EXPECT_FALSE(std::filesystem::exists(folder_ / "twice.gguf"));
}

// What it was made for, and what lies under it, go with it, and its id.
TEST_F(ExportTest, APackKeepsItsLineageOnAnEditedFolder) {
  const auto made = [&](const std::string& name, const std::string& model, const std::string& subject) {
    write_file(folder_ / (name + ".jsonl"),
               json{{"prompt", "{} is in the city of"}, {"subject", subject}, {"target_new", "Oslo"}}.dump() + "\n");
    must_run("memit_edit", edit({"--model", path(model), "--facts", path(name + ".jsonl"), "--out", path(name),
                                 "--eval", "none", "--quiet"}));
  };
  made("upper", "run/model", "The Colosseum");
  made("other", "model", "The Louvre");
  for (const std::string name : {"upper", "other"}) {
    const auto run = [&](std::vector<std::string> words) { must_run("emend", words); };
    const std::string pack = path(name + "/edit.safetensors");
    run({"export", pack, "--model", path("run/model"), "--to", "pack", "--out", path(name + ".st")});
    EXPECT_TRUE(read_file(path(name + ".st")) == read_file(pack)) << name;
    run({"export", pack, "--model", path("run/model"), "--to", "model", "--out", path(name + "-model")});
    run({"apply", path(name + ".st"), "--model", path("run/model"), "--out", path(name + "-applied")});
    EXPECT_TRUE(model_bytes(name + "-model") == model_bytes(name + "-applied")) << name;
    run({"revert", pack, "--model", path(name + "-model")});
    EXPECT_TRUE(model_bytes(name + "-model") == model_bytes("run/model")) << name;
    run({"diff", path(name + ".st"), pack});  // known by its content
  }
}

TEST_F(ExportTest, APackOfOtherShapesIsRefusedHoweverItIsForced) {
  write_tiny_model(folder_ / "wide", 9, {{"intermediate_size", 96}});
  for (const std::string form : {"pack", "peft", "model"}) {
    const auto result = run_program("emend", {"export", path("run/edit.safetensors"), "--model", path("wide"), "--to",
                                              form, "--out", path("forced"), "--force"});
    EXPECT_EQ(result.status, 2) << form;
    EXPECT_NE(result.err.find("a change of another shape"), std::string::npos) << result.err;
    EXPECT_FALSE(std::filesystem::exists(folder_ / "forced"));
  }
}

TEST_F(ExportTest, ACardSaysWhatWasEditedHowItWasMeasuredAndHowToTakeItBack) {
  ASSERT_EQ(
      run_program("memit_edit", edit({"--out", path("measured"), "--save", "pack", "--eval", "easyedit", "--quiet"}))
          .status,
      0);
  const std::vector<std::string> of = {"export", path("measured/edit.safetensors"), "--model", path("model"), "--card"};
  for (const std::string form : {"model", "lora"}) {
    auto arguments = of;
    for (const auto& word : {std::string("--to"), form, std::string("--out"), path("card-" + form)})
      arguments.push_back(word);
    must_run("emend", arguments);
    const std::string card = read_file(path(form == "model" ? "card-model/README.md" : "card-lora.md"));
    expect_parts(card, {"base_model:", "The Eiffel Tower is in the city of | Rome", "method: `memit`", "rewrite\\_acc",
                        "layers.1.mlp.down_proj.weight", "How to take it back"});
    EXPECT_NE(card.find(form == "model" ? "`emend revert` takes it back" : "Leave the adapter out"), std::string::npos)
        << card;
  }
  std::filesystem::remove(path("card-lora"));
  auto again = of;
  for (const auto& word : {std::string("--to"), std::string("lora"), std::string("--out"), path("card-lora")})
    again.push_back(word);
  const auto there = run_program("emend", again);
  EXPECT_EQ(there.status, 2) << "a card that is there stays";
  EXPECT_NE(there.err.find("card-lora.md: it exists already"), std::string::npos) << there.err;
  EXPECT_FALSE(std::filesystem::exists(path("card-lora")));
  write_file(folder_ / "measured" / "results.json",
             R"({"edits": {"applied": 2}, "metrics": {"a": {"post": {"b": 1}, "pre": 5}}})");
  again.push_back("--force");
  must_run("emend", again);
  EXPECT_NE(read_file(path("card-lora.md")).find("No measurements"), std::string::npos);
  must_run("emend", {"revert", "--all", "--model", path("card-model"), "--quiet"});
  EXPECT_EQ(model_bytes("card-model"), model_bytes());
}

TEST_F(ExportTest, RefusesInsteadOfOverwritingOrCutting) {
  ASSERT_EQ(export_to("lora", "lora.gguf").status, 0);
  auto result = export_to("lora", "lora.gguf");
  expect_ended(result, 2, {"--force"});
  EXPECT_EQ(export_to("lora", "lora.gguf", {"--force"}).status, 0);
  expect_ended(export_to("peft", "cut", {"--max-rank", "1", "--max-error", "1e-6"}), 2, {"relative error"});
  EXPECT_FALSE(std::filesystem::exists(folder_ / "cut" / "adapter_config.json"));
  write_tiny_model(folder_ / "other", 9);
  expect_ended(run_program("emend", {"export", path("run/edit.safetensors"), "--model", path("other"), "--to", "peft",
                                     "--out", path("wrong")}),
               2, {"a pack made for the model"});
}

TEST_F(ExportTest, ReplacesNothingButAModel) {
  const auto pack = read_file(folder_ / "run" / "edit.safetensors"), results = read_file(folder_ / "run/results.json");
  write_file(folder_ / "run" / "other.safetensors", pack);
  ASSERT_EQ(export_to("model", "run", {"--force"}).status, 0);
  EXPECT_TRUE(read_file(folder_ / "run" / "edit.safetensors") == pack);
  EXPECT_TRUE(read_file(folder_ / "run" / "other.safetensors") == pack);
  EXPECT_EQ(read_file(folder_ / "run" / "results.json"), results);
  expect_ended(export_to("model", "run", {"--force"}), 0, {"is replaced, and with it its edits"});
  expect_ended(must_run("emend", {"convert", path("model"), path("run"), "--force"}), 0,
               {"is replaced, and with it its edits"});
  EXPECT_TRUE(read_file(folder_ / "run" / "edit.safetensors") == pack);
}

// Every adaptable weight of the families that llama.cpp names: b·a in the file's order is the change in the file's
// order, which the whole model's GGUF writer defines.
TEST(GgufLora, FactorsFollowTheRowsOfTheFile) {
  const TemporaryFolder folder("gguf_lora");
  int checked = 0;
  for (const char* family : {"llama", "gpt2", "qwen2", "gpt_neox", "phi3", "falcon"}) {
    auto model = debug_model(family, 3);
    models::GgufWriteOptions options;
    options.type = models::GgmlType::kF32;
    options.vocabulary = false;
    (void)models::write_gguf(model, folder.path() / "before.gguf", options);
    std::vector<models::LoraFactors> factors;
    at::manual_seed(1);
    for (const auto& name : model.adaptable_weights()) {
      if (!name.ends_with(".weight")) continue;
      const at::Tensor weight = model.weight(name);
      const bool turned = model.family().orientation == models::Orientation::kInOut;
      const int64_t out = weight.size(turned ? 1 : 0), in = weight.size(turned ? 0 : 1);
      const at::Tensor a = at::randn({2, in}), b = at::randn({out, 2}), change = b.mm(a);
      factors.push_back({name, a, b});
      model.set_weight(name, weight + (turned ? change.t() : change));
    }
    (void)models::write_gguf(model, folder.path() / "after.gguf", options);
    const auto adapted = models::write_gguf_lora(model, factors, folder.path() / "lora.gguf");
    const models::GgufFile before(folder.path() / "before.gguf"), after(folder.path() / "after.gguf"),
        lora(folder.path() / "lora.gguf");
    for (const auto& name : adapted) {
      const at::Tensor change = tensor_of(lora, name + ".lora_b").mm(tensor_of(lora, name + ".lora_a"));
      EXPECT_LT((tensor_of(before, name) + change - tensor_of(after, name)).abs().max().item<double>(), 1e-4)
          << family << " " << name;
      ++checked;
    }
  }
  EXPECT_GT(checked, 40);
}

}  // namespace export_test
}  // namespace emend::testing
