// emend convert: folder to GGUF to folder for every family that llama.cpp names, dtypes, the tokenizer, refusals.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/safetensors.h>
#include <emend/models/config.h>
#include <emend/models/generation.h>
#include <emend/models/gguf/convert.h>
#include <emend/models/gguf/detail/hf_vocabulary.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include "support/debug_models.h"
#include "support/gguf_builder.h"
#include "support/program.h"
#include "support/random_text.h"
#include "support/shared.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace emend::testing {
namespace convert_test {

using nlohmann::json;
namespace fs = std::filesystem;

const std::string kStrings =
    R"(["Hello, world", "  two  spaces\r\n\ttab", "Ünïcödé 日本語 🙂‍↔️", "<|end|>a<|end|>", "", "1234567 don't"])";

class Convert : public ::testing::Test {
 protected:
  void SetUp() override { write_file(root_ / "strings.json", kStrings); }

  [[nodiscard]] std::string path(const std::string& name) const { return (root_ / name).string(); }

  // A random model of the family's first flavour with a vocabulary of 257, and the byte-level tokenizer.
  void write_model(const std::string& name, const models::FamilySpec& family, at::ScalarType dtype = at::kFloat) const {
    json config = json::parse(family.debug.front().config);
    for (const auto& key : family.keys.vocab)
      if (config.contains(key)) config[key] = 257;
    config["eos_token_id"] = 256;
    models::write_folder(*models::random_checkpoint(config, 23), root_ / name, dtype);
    write_file(root_ / name / "tokenizer.json", byte_tokenizer().dump());
    write_file(root_ / name / "tokenizer_config.json",
               R"({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})");
  }

  ProgramResult emend(const std::vector<std::string>& arguments, int status = 0) const {
    auto result = run_program("emend", arguments);
    EXPECT_EQ(result.status, status) << result.err;
    EXPECT_EQ(result.err.find("internal error"), std::string::npos) << result.err;
    return result;
  }
  json convert(const std::string& source, const std::string& target, std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {"convert", path(source), path(target), "--json", "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto result = emend(arguments);
    const json document = json::parse(result.out, nullptr, false);
    EXPECT_TRUE(document.is_object()) << result.out;
    for (const auto& file : document["files"]) EXPECT_TRUE(fs::exists(file.get<std::string>())) << file;
    return document;
  }
  [[nodiscard]] std::string greedy(const std::string& model) const {
    return emend({"generate", "--model", path(model), "--prompt", "The tower", "--max-new-tokens", "12",
                  "--temperature", "0", "--ignore-eos", "--json", "--quiet"})
        .out;
  }
  [[nodiscard]] std::string token_ids(const std::string& model) const {
    return emend({"tokenize", "--model", path(model), "--file", path("strings.json"), "--json", "--quiet"}).out;
  }
  void expect_refusal(const std::vector<std::string>& arguments, int status,
                      const std::vector<std::string>& words) const {
    expect_ended(emend(arguments, status), status, words);
  }
  void nothing_left_over() const {
    for (const auto& entry : fs::recursive_directory_iterator(root_)) {
      const std::string name = entry.path().filename().string();
      EXPECT_TRUE(name.find(".tmp-") == std::string::npos && name.find(".partial-") == std::string::npos)
          << entry.path();
    }
  }

  const TemporaryFolder folder_{"convert"};
  const fs::path root_ = folder_.path();
};

std::map<std::string, at::Tensor> tensors_of(const fs::path& folder) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") {
      const SafetensorsFile file(entry.path());
      for (const auto& [name, info] : file.tensors()) tensors[name] = file.tensor(name).clone();
    }
  return tensors;
}

double largest(const at::Tensor& x) {
  return x.abs().max().item<double>();
}

// Inside this process: starting the program some seventy times takes most of a minute.
TEST_F(Convert, EveryFamilyThatLlamaCppNamesComesBackWithBitEqualTensorsIdsAndText) {
  const auto strings = json::parse(kStrings);
  const auto ids_of = [&](const std::string& name) {
    const auto tokenizer = models::open_checkpoint(path(name))->load_tokenizer();
    std::vector<std::vector<int64_t>> ids;
    for (const auto& text : strings) ids.push_back(tokenizer->encode_ids(text.get<std::string>(), true));
    return ids;
  };
  const auto text_of = [&](const std::string& name) {
    const models::Model model = models::load_model(path(name));
    models::GenerateOptions greedy{.temperature = 0};
    greedy.max_new_tokens = 12;
    return models::generate(model, {model.tokenizer().encode_ids("The tower")}, greedy);
  };
  for (const char* name : {"llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "phi", "gemma", "falcon", "chatglm"}) {
    SCOPED_TRACE(name);
    const auto& family = models::family_named(name);
    write_model("source", family);
    (void)models::convert_model(path("source"), path("model.gguf"), {.type = "F32"});
    const auto back = models::convert_model(path("model.gguf"), path("back"));
    EXPECT_EQ(back.format, models::ModelFormat::kHuggingFace);
    EXPECT_EQ(back.types.size(), 1u);
    const auto before = tensors_of(root_ / "source"), after = tensors_of(root_ / "back");
    ASSERT_EQ(before.size(), after.size());
    for (const auto& [tensor, value] : before) {
      ASSERT_TRUE(after.count(tensor)) << tensor;
      EXPECT_TRUE(at::equal(after.at(tensor), value)) << tensor;
    }
    for (const char* other : {"model.gguf", "back"}) {
      EXPECT_EQ(ids_of(other), ids_of("source")) << other;
      EXPECT_EQ(text_of(other), text_of("source")) << other;
    }
    for (const char* left : {"source", "model.gguf", "back"}) fs::remove_all(root_ / left);
  }
}

// Tokenizers as published, on a model of two layers' width: normalizers, added tokens, prefixes, scores, ranks.
TEST_F(Convert, PublishedTokenizersKeepTheirIdsAndTheirFiles) {
  EMEND_NEEDS_SHARED();
  std::mt19937_64 random(31);
  std::vector<std::string> texts = {"", " a", "<s>x</s>\n y", "[gMASK]sop <|user|>\n hi",
                                    "n\u0303 e\u0301 \u1100\u1161"};
  for (int i = 0; i < 150; ++i) texts.push_back(random_text(random));
  for (const char* name :
       {"gpt2", "llama3", "llama2", "phi3", "qwen2", "gpt_neox", "falcon", "smollm2", "chatglm3", "qwen_v1"}) {
    SCOPED_TRACE(name);
    for (const char* left : {"source", "model.gguf", "back"}) fs::remove_all(root_ / left);
    const fs::path published = shared_dir() / "fixtures" / "tokenizers" / name;
    const auto original = models::load_tokenizer(published);
    const json config = {{"model_type", "llama"},         {"hidden_size", 8},
                         {"num_hidden_layers", 1},        {"num_attention_heads", 2},
                         {"intermediate_size", 16},       {"vocab_size", original->vocab_size() + 3},
                         {"max_position_embeddings", 64}, {"tie_word_embeddings", true}};
    models::write_folder(*models::random_checkpoint(config, 2), root_ / "source");
    models::save_tokenizer(*original, root_ / "source");
    (void)models::convert_model(path("source"), path("model.gguf"), {.type = "F16"});
    (void)models::convert_model(path("model.gguf"), path("back"));
    const auto source = models::load_tokenizer(root_ / "source"), back = models::load_tokenizer(root_ / "back");
    const auto from_gguf = models::open_checkpoint(path("model.gguf"))->load_tokenizer();
    for (const auto* other : {from_gguf.get(), back.get()}) {
      EXPECT_EQ(other->prefix_ids(), source->prefix_ids());
      EXPECT_EQ(other->eos_ids(), source->eos_ids());
      for (const auto& text : texts)
        for (const bool special : {false, true}) {
          const auto ids = source->encode_ids(text, special);
          EXPECT_EQ(other->encode_ids(text, special), ids) << text;
          EXPECT_EQ(other->decode(ids), source->decode(ids)) << text;
        }
    }
    for (const auto& entry : fs::directory_iterator(root_ / "source")) {
      const std::string file = entry.path().filename().string();
      if (file != "config.json" && file != "model.safetensors") {
        EXPECT_EQ(read_file(root_ / "back" / file), read_file(entry.path())) << file;
      }
    }
    // Without the kept files the vocabulary of llama.cpp's form is there all the same.
    models::GgufWriteOptions bare;
    bare.keep_config = false;
    (void)models::write_gguf(*models::open_checkpoint(path("source")), root_ / "model.gguf", bare);
    EXPECT_GE(models::open_checkpoint(path("model.gguf"))->load_tokenizer()->vocab_size(), original->vocab_size());
  }
}

TEST_F(Convert, DamagedKeptTokenizersAreRefusedByName) {
  const auto refused = [&](const std::vector<std::string>& list) {
    models::GgufMetadata metadata;
    metadata.set_text("general.architecture", "llama");
    metadata.set_texts(models::detail::kTokenizerKey, list);
    write_gguf_file(root_ / "x.gguf", metadata, {});
    try {
      (void)models::detail::kept_tokenizer(models::GgufFile(root_ / "x.gguf"), json::object());
    } catch (const Error& error) {
      EXPECT_EQ(error.error_class(), ErrorClass::kCorruption);
      const std::string text = error.what();
      EXPECT_NE(text.find("emend.tokenizer"), std::string::npos) << text;
      EXPECT_EQ(text.find("emend-tokenizer-"), std::string::npos) << text;
      return;
    }
    ADD_FAILURE() << "accepted " << list[0];
  };
  const std::string good = byte_tokenizer().dump();
  for (const char* name :
       {"../tokenizer.json", "/etc/tokenizer.json", "config.json", "model.safetensors", "", "tokenizer/x"})
    refused({name, good});
  refused({"tokenizer.json"});
  refused({"tokenizer.json", "{"});
  refused({"tokenizer.json", "{}"});
  refused({"tokenizer_config.json", "{}"});
  refused({"hex:tokenizer.model", "0g"});
  refused({"hex:tokenizer.model", "abc"});
  refused({"hex:tokenizer.model", "00"});
}

TEST_F(Convert, TheProgramGoesThereAndBack) {
  write_model("source", models::family_named("gpt2"));
  EXPECT_EQ(convert("source", "model.gguf")["format"], "gguf");
  const auto back = convert("model.gguf", "back");
  EXPECT_EQ(back["format"], "huggingface");
  EXPECT_EQ(back["tensors"], tensors_of(root_ / "source").size());
  for (const auto& [tensor, value] : tensors_of(root_ / "back"))
    EXPECT_TRUE(at::equal(value, tensors_of(root_ / "source").at(tensor))) << tensor;
  const std::string ids = token_ids("source"), text = greedy("source");
  for (const char* other : {"model.gguf", "back"}) {
    EXPECT_EQ(token_ids(other), ids) << other;
    EXPECT_EQ(greedy(other), text) << other;
  }
}

TEST_F(Convert, GemmaInBfloat16ComesBackBitEqual) {
  write_model("source", models::family_named("gemma"), at::kBFloat16);
  convert("source", "model.gguf");
  convert("model.gguf", "back", {"--type", "bfloat16"});
  const auto before = tensors_of(root_ / "source"), after = tensors_of(root_ / "back");
  ASSERT_EQ(before.size(), after.size());
  for (const auto& [tensor, value] : before) EXPECT_TRUE(at::equal(after.at(tensor), value)) << tensor;
}

TEST_F(Convert, NarrowTypesStayWithinTheirRounding) {
  for (const char* name : {"llama", "gpt2", "falcon"}) {
    SCOPED_TRACE(name);
    write_model("source", models::family_named(name));
    const auto before = tensors_of(root_ / "source");
    for (const std::string type : {"F16", "BF16", "Q8_0"}) {
      SCOPED_TRACE(type);
      const auto written = models::convert_model(path("source"), path("model.gguf"), {.type = type, .overwrite = true});
      EXPECT_GT(written.types.count(type), 0u);
      (void)models::convert_model(path("model.gguf"), path("back"), {.type = "F32", .overwrite = true});
      const auto after = tensors_of(root_ / "back");
      for (const auto& [tensor, value] : before) {
        const at::Tensor got = after.at(tensor), error = (got - value).abs();
        // Half a step: 11 or 8 bits of each value; for Q8_0 of the block's largest, and its scale is itself an F16.
        const at::Tensor bound = type == "F16"    ? value.abs() * std::pow(2.0, -11)
                                 : type == "BF16" ? value.abs() * std::pow(2.0, -8)
                                                  : at::full_like(value, 0.57 * largest(value) / 127);
        EXPECT_TRUE((error <= bound + 1e-7).all().item<bool>()) << tensor << " " << largest(error);
      }
    }
    for (const char* left : {"source", "model.gguf", "back"}) fs::remove_all(root_ / left);
  }
}

TEST_F(Convert, FolderToFolderChangesOnlyTheDtype) {
  write_model("source", models::family_named("llama"));
  write_file(root_ / "source" / "generation_config.json", R"({"eos_token_id": 256})");
  write_file(root_ / "source" / "modeling_remote.py", "pass\n");
  write_file(root_ / "source" / "README.md", "of the source");
  const auto report = convert("source", "half", {"--type", "bfloat16", "--shard-size", "20KB"});
  EXPECT_EQ(report["notes"], json::array({"not copied: README.md"}));
  EXPECT_EQ(report["types"].value("BF16", 0), report["tensors"].get<int>());
  EXPECT_TRUE(fs::exists(root_ / "half" / "model.safetensors.index.json"));
  EXPECT_EQ(json::parse(read_file(root_ / "half" / "config.json"))["torch_dtype"], "bfloat16");
  for (const char* file : {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "modeling_remote.py"})
    EXPECT_EQ(read_file(root_ / "half" / file), read_file(root_ / "source" / file)) << file;
  const auto before = tensors_of(root_ / "source"), after = tensors_of(root_ / "half");
  ASSERT_EQ(before.size(), after.size());
  for (const auto& [name, value] : before) EXPECT_TRUE(at::equal(after.at(name), value.to(at::kBFloat16))) << name;
  EXPECT_EQ(token_ids("half"), token_ids("source"));
  // Widening changes no value, and without a type nothing changes at all.
  convert("half", "wide", {"--type", "F32"});
  convert("source", "same");
  for (const auto& [name, value] : tensors_of(root_ / "wide"))
    EXPECT_TRUE(at::equal(value, after.at(name).to(at::kFloat)));
  EXPECT_EQ(read_file(root_ / "same" / "config.json"), read_file(root_ / "source" / "config.json"));
  EXPECT_EQ(greedy("same"), greedy("source"));
  EXPECT_EQ(greedy("wide"), greedy("half"));
}

TEST_F(Convert, AnExistingTargetIsKeptUnlessForced) {
  write_model("source", models::family_named("llama"));
  convert("source", "model.gguf");
  const std::string bytes = read_file(root_ / "model.gguf");
  expect_refusal({"convert", path("source"), path("model.gguf")}, 2, {"model.gguf", "already there", "--force"});
  EXPECT_EQ(read_file(root_ / "model.gguf"), bytes);
  convert("source", "model.gguf", {"--type", "Q8_0", "--force"});
  EXPECT_LT(fs::file_size(root_ / "model.gguf"), bytes.size());

  fs::create_directories(root_ / "taken");
  write_file(root_ / "taken" / "config.json", "{}");
  write_file(root_ / "taken" / "model-00001-of-00002.safetensors", "old");
  write_file(root_ / "taken" / "notes.md", "mine");
  expect_refusal({"convert", path("source"), path("taken")}, 2, {"taken", "already holds a model", "--force"});
  EXPECT_EQ(read_file(root_ / "taken" / "config.json"), "{}");
  convert("source", "taken", {"--force"});
  EXPECT_FALSE(fs::exists(root_ / "taken" / "model-00001-of-00002.safetensors"));
  EXPECT_EQ(read_file(root_ / "taken" / "notes.md"), "mine");
  EXPECT_EQ(greedy("taken"), greedy("source"));
  expect_refusal({"convert", path("source"), path("source"), "--force"}, 2, {"it is also what is read"});
  EXPECT_EQ(greedy("taken"), greedy("source"));
  nothing_left_over();
}

TEST_F(Convert, WhatCannotBeDoneIsSaidAndLeavesNothing) {
  write_model("source", models::family_named("llama"));
  write_model("opt", models::family_named("opt"));
  write_file(root_ / "file.txt", "x");
  expect_refusal({"convert", path("source"), path("out"), "--type", "Q8_0"}, 2, {"Q8_0", "F32, F16 or BF16", ".gguf"});
  expect_refusal({"convert", path("source"), path("out.gguf"), "--type", "Q9"}, 2, {"Q9", "Q8_0"});
  expect_refusal({"convert", path("source"), path("out"), "--shard-size", "lots"}, 2, {"--shard-size", "lots", "10GB"});
  expect_refusal({"convert", path("source"), path("out"), "--shard-size", "0"}, 2, {"--shard-size", "5GB"});
  expect_refusal({"convert", path("source"), path("one.gguf"), "--shard-size", "1MB"}, 2, {"--shard-size", "a folder"});
  expect_refusal({"convert", path("nowhere"), path("out")}, 3, {"nowhere"});
  expect_refusal({"convert", path("source"), path("file.txt")}, 2, {"file.txt", "a file"});
  expect_refusal({"convert", path("opt"), path("out.gguf")}, 3, {"opt"});
  expect_refusal({"convert", path("source")}, 2, {"--out is required"});
  EXPECT_FALSE(fs::exists(root_ / "out") || fs::exists(root_ / "out.gguf"));

  auto damaged = tensors_of(root_ / "source");
  damaged.begin()->second.fill_(1e6);
  std::vector<std::pair<std::string, at::Tensor>> list(damaged.begin(), damaged.end());
  write_safetensors(root_ / "source" / "model.safetensors", list, {{"format", "pt"}});
  expect_refusal({"convert", path("source"), path("out"), "--type", "F16"}, 4, {damaged.begin()->first, "65504"});
  expect_refusal({"convert", path("source"), path("out.gguf"), "--type", "F16"}, 4, {});
  ProgramOptions full_disk;
  full_disk.file_size_limit = 4096;
  for (const char* target : {"out", "out.gguf"}) {
    const auto result = run_program("emend", {"convert", path("source"), path(target)}, full_disk);
    EXPECT_NE(result.status, 0);
    EXPECT_NE(result.err.find(target), std::string::npos) << result.err;
  }
  EXPECT_FALSE(fs::exists(root_ / "out") || fs::exists(root_ / "out.gguf"));
  nothing_left_over();
}

TEST_F(Convert, HelpShowsExamples) {
  const std::string help = emend({"convert", "--help"}).out;
  expect_parts(help, {"SOURCE", "TARGET", "--type", "--force", "Examples", "Q8_0", "--json"});
}

}  // namespace convert_test
}  // namespace emend::testing
