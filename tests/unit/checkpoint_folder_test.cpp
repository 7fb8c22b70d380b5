// Model folders: single and sharded files, the hub cache, and damaged ones.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/models/gguf/gguf_writer.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>

#include "support/debug_models.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace emend::models {
namespace checkpoint_folder_test {

namespace fs = std::filesystem;
using Json = nlohmann::json;

class Folder : public ::testing::Test {
 protected:
  const testing::TemporaryFolder temporary_{"checkpoint_folder"};
  const fs::path root_ = temporary_.path(), folder_ = root_ / "model";
  std::shared_ptr<const Checkpoint> source_ = random_checkpoint(testing::debug_config("llama"), 7);

  void SetUp() override { fs::create_directories(folder_); }

  NamedTensors tensors(at::ScalarType dtype = at::kFloat) const { return tensors_of(*source_, dtype); }
  void write_config(Json extra = Json::object()) {
    Json config = source_->config();
    config.update(extra);
    write_file(folder_ / "config.json", config.dump(1));
  }
  // With a head that repeats the embedding.
  NamedTensors tied_tensors() const {
    auto all = tensors();
    for (auto& [name, tensor] : all)
      if (name == "lm_head.weight") tensor = source_->read("model.embed_tokens.weight");
    return all;
  }
  void write_single(at::ScalarType dtype = at::kFloat) { write_folder(*source_, folder_, dtype); }
  // Three files, tensors dealt out in turn.
  Json write_sharded(at::ScalarType dtype = at::kFloat) {
    write_config();
    std::vector<NamedTensors> shards(3);
    Json index = {{"metadata", {{"total_size", 1}}}, {"weight_map", Json::object()}};
    size_t i = 0;
    for (auto& tensor : tensors(dtype)) {
      index["weight_map"][tensor.first] = "model-0000" + std::to_string(i % 3 + 1) + "-of-00003.safetensors";
      shards[i++ % 3].push_back(tensor);
    }
    for (size_t s = 0; s < 3; ++s)
      write_safetensors(folder_ / ("model-0000" + std::to_string(s + 1) + "-of-00003.safetensors"), shards[s],
                        {{"format", "pt"}});
    write_index(index);
    return index;
  }
  void write_index(const Json& index) { write_file(folder_ / "model.safetensors.index.json", index.dump(1)); }

  std::string error_of(ErrorClass expected, const std::string& name = "") {
    return testing::error_of([&] { (void)load_model(name.empty() ? folder_.string() : name); }, expected);
  }
  at::Tensor logits(const Model& model) {
    const at::NoGradGuard no_grad;
    return model.forward(TokenBatch::from_rows({{1, 2, 3}, {4, 5}})).logits;
  }
};

TEST_F(Folder, SingleAndShardedFilesGiveTheSameModel) {
  write_single();
  const Model single = load_model(folder_.string());
  fs::remove(folder_ / "model.safetensors");
  write_sharded();
  const Model sharded = load_model(folder_.string());
  EXPECT_TRUE(at::equal(logits(single), logits(sharded)));
  EXPECT_EQ(single.fingerprint(), sharded.fingerprint());
  EXPECT_TRUE(at::equal(logits(single), logits(load_model(source_))));
}

TEST_F(Folder, WeightsAreViewsOfTheFileAndEditsStayPrivate) {
  write_single();
  Model first = load_model(folder_.string());
  const auto checkpoint = open_checkpoint(folder_.string());
  const Model second = load_model(checkpoint);
  const std::string before = first.fingerprint(), bytes = read_file(folder_ / "model.safetensors");
  const at::Tensor plain = logits(second);
  for (const std::string& name : first.weight_names()) first.set_weight(name, first.weight(name) + 1);
  EXPECT_TRUE(at::equal(logits(second), plain));
  EXPECT_EQ(read_file(folder_ / "model.safetensors"), bytes);
  EXPECT_EQ(first.checkpoint().fingerprint(), checkpoint->fingerprint());
  EXPECT_EQ(first.fingerprint(), before);
  EXPECT_EQ(second.fingerprint(), before);
}

TEST_F(Folder, ReplacingTheFileOnDiskDoesNotTouchAnOpenModel) {
  write_single();
  const auto checkpoint = open_checkpoint(folder_.string());
  const std::string before = checkpoint->fingerprint();
  auto changed = tensors();
  for (auto& [name, tensor] : changed) tensor.add_(1);
  write_safetensors(folder_ / "model.safetensors", changed);
  EXPECT_EQ(checkpoint->fingerprint(), before);
  EXPECT_TRUE(at::equal(checkpoint->read("model.norm.weight"), source_->read("model.norm.weight")));
}

TEST_F(Folder, HalfPrecisionFilesAreComputedInFloat32) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    write_single(dtype);
    const Model model = load_model(folder_.string());
    EXPECT_EQ(model.dtype(), at::kFloat);
    EXPECT_TRUE(
        at::equal(model.weight("model.norm.weight"), source_->read("model.norm.weight").to(dtype).to(at::kFloat)));
  }
  EXPECT_THROW((void)load_model(folder_.string(), {.dtype = at::kHalf}), Error);
}

TEST_F(Folder, IgnoredBuffersAreIgnoredAndKept) {
  write_config();
  auto all = tensors();
  all.emplace_back("model.layers.0.self_attn.rotary_emb.inv_freq", at::ones({4}));
  write_safetensors(folder_ / "model.safetensors", all);
  const Model model = load_model(folder_.string());
  EXPECT_FALSE(model.has_weight("model.layers.0.self_attn.rotary_emb.inv_freq"));
  (void)save_model(model, root_ / "out");
  EXPECT_TRUE(
      SafetensorsFile(root_ / "out" / "model.safetensors").contains("model.layers.0.self_attn.rotary_emb.inv_freq"));
}

TEST_F(Folder, ATiedFileMayRepeatItsHead) {
  write_config({{"tie_word_embeddings", true}});
  auto all = tied_tensors();
  write_safetensors(folder_ / "model.safetensors", all);
  Model model = load_model(folder_.string());
  EXPECT_TRUE(at::equal(model.weight("lm_head.weight"), source_->read("model.embed_tokens.weight")));
  std::erase_if(all, [](const auto& t) { return t.first == "lm_head.weight"; });
  write_safetensors(folder_ / "model.safetensors", all);
  EXPECT_TRUE(at::equal(logits(model), logits(load_model(folder_.string()))));
  write_config({{"tie_word_embeddings", false}});
  EXPECT_NE(error_of(ErrorClass::kCorruption).find("tied"), std::string::npos);
}

TEST_F(Folder, AHeadOfItsOwnIsNotLostWhereTheConfigurationTiesIt) {
  write_config({{"tie_word_embeddings", true}});
  auto all = tied_tensors();
  for (auto& [name, tensor] : all)
    if (name == "lm_head.weight") (tensor = tensor.clone())[3][2] += 1e-3;
  write_safetensors(folder_ / "model.safetensors", all);
  const std::string error = error_of(ErrorClass::kCorruption);
  for (const char* part : {"lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings to false"})
    EXPECT_NE(error.find(part), std::string::npos) << error;
  EXPECT_THROW((void)write_gguf(*open_checkpoint(folder_.string()), root_ / "x.gguf"), Error);
}

TEST_F(Folder, FindsModelsInTheHubCache) {
  const fs::path snapshot = root_ / "hub" / "models--some-org--Tiny_1.0" / "snapshots" / "abc123";
  fs::create_directories(snapshot);
  write_single();
  const fs::path blobs = snapshot.parent_path().parent_path() / "blobs";
  fs::create_directories(blobs);
  for (const auto& entry : fs::directory_iterator(folder_)) {
    fs::copy_file(entry.path(), blobs / entry.path().filename());
    fs::create_symlink("../../blobs" / entry.path().filename(), snapshot / entry.path().filename());
  }
  const auto variable = [](const char* name, const fs::path& value) { ::setenv(name, value.c_str(), 1); };
  ::unsetenv("HF_HUB_CACHE");
  variable("HF_HOME", root_);
  EXPECT_EQ(load_model("some-org/Tiny_1.0").n_layers(), 3);  // the only snapshot
  fs::create_directories(snapshot.parent_path() / "def456");
  EXPECT_NE(error_of(ErrorClass::kNotFound, "some-org/Tiny_1.0").find("models--some-org--Tiny_1.0"), std::string::npos);
  fs::create_directories(snapshot.parent_path().parent_path() / "refs");
  write_file(snapshot.parent_path().parent_path() / "refs" / "main", "abc123\n");
  EXPECT_EQ(load_model("some-org/Tiny_1.0").n_layers(), 3);
  write_file(snapshot.parent_path().parent_path() / "refs" / "main", "../../../..");
  EXPECT_NE(error_of(ErrorClass::kNotFound, "some-org/Tiny_1.0").find("hub"), std::string::npos);
  variable("HF_HUB_CACHE", root_ / "elsewhere");  // wins over HF_HOME
  EXPECT_NE(error_of(ErrorClass::kNotFound, "some-org/Tiny_1.0").find("elsewhere"), std::string::npos);
  for (const char* name : {"../model", "a/b/c", "", "/no/such", "some org/x"})
    EXPECT_FALSE(error_of(ErrorClass::kNotFound, std::string(name).empty() ? " " : name).empty());
  ::unsetenv("HF_HUB_CACHE");
  variable("HF_HOME", "~/own");
  EXPECT_EQ(error_of(ErrorClass::kNotFound, "some-org/Tiny_1.0").find("~/own"), std::string::npos);
  ::unsetenv("HF_HOME");
  const char* const caches = std::getenv("XDG_CACHE_HOME");
  const std::string before = caches ? caches : "";
  variable("XDG_CACHE_HOME", root_ / "caches");
  EXPECT_NE(error_of(ErrorClass::kNotFound, "some-org/Tiny_1.0").find("caches/huggingface/hub"), std::string::npos);
  caches ? ::setenv("XDG_CACHE_HOME", before.c_str(), 1) : ::unsetenv("XDG_CACHE_HOME");
}

TEST_F(Folder, SaysWhatIsMissing) {
  EXPECT_NE(error_of(ErrorClass::kNotFound).find("config.json"), std::string::npos);
  write_config();
  EXPECT_NE(error_of(ErrorClass::kNotFound).find("model.safetensors"), std::string::npos);
  write_file(folder_ / "pytorch_model.bin", "x");
  const std::string text = error_of(ErrorClass::kUnsupported);
  EXPECT_NE(text.find("save_pretrained"), std::string::npos) << text;
  EXPECT_NE(error_of(ErrorClass::kUnsupported, (folder_ / "pytorch_model.bin").string()).find("folder"),
            std::string::npos);
}

TEST_F(Folder, RefusesDamagedConfigurations) {
  write_single();
  for (const char* text : {"", "{", "{\"model_type\": \"llama\",}", "[1,2]", "\xff\xfe"}) {
    write_file(folder_ / "config.json", text);
    EXPECT_NE(error_of(ErrorClass::kCorruption).find("config.json"), std::string::npos);
  }
  for (const char* text :
       {R"({"model_type": "llama", "model_type": "gpt2"})", R"({"a": [{"b": {}, "c": 1, "c": 1}]})"}) {
    write_file(folder_ / "config.json", text);
    EXPECT_NE(error_of(ErrorClass::kCorruption).find("twice"), std::string::npos);
  }
}

TEST_F(Folder, RefusesIndexesThatLeadOutOfTheFolder) {
  const Json good = write_sharded();
  for (const char* file : {"../model-00001-of-00003.safetensors", "/etc/passwd", "..", ".hidden.safetensors",
                           "sub/model.safetensors", "", "model.bin", "..\\x.safetensors"}) {
    Json index = good;
    index["weight_map"]["model.norm.weight"] = file;
    write_index(index);
    EXPECT_NE(error_of(ErrorClass::kCorruption).find("model.norm.weight"), std::string::npos) << file;
  }
}

TEST_F(Folder, RefusesIndexesThatDoNotMatchTheFiles) {
  const Json good = write_sharded();
  const auto refused = [&](ErrorClass expected, const char* part, const std::function<void(Json&)>& change) {
    Json index = good;
    change(index);
    write_index(index);
    EXPECT_NE(error_of(expected).find(part), std::string::npos) << part;
  };
  refused(ErrorClass::kNotFound, "00004",
          [](Json& i) { i["weight_map"]["model.norm.weight"] = "model-00004-of-00003.safetensors"; });
  refused(ErrorClass::kCorruption, "model.more.weight",
          [](Json& i) { i["weight_map"]["model.more.weight"] = "model-00001-of-00003.safetensors"; });
  refused(ErrorClass::kCorruption, "model.norm.weight", [](Json& i) { i["weight_map"].erase("model.norm.weight"); });
  refused(ErrorClass::kCorruption, "file name", [](Json& i) { i["weight_map"]["model.norm.weight"] = 7; });
  refused(ErrorClass::kCorruption, "weight_map", [](Json& i) { i.erase("weight_map"); });
  refused(ErrorClass::kCorruption, "empty", [](Json& i) { i["weight_map"] = Json::object(); });
  refused(ErrorClass::kCorruption, "weight_map", [](Json& i) { i = 3; });
  write_index(good);
  fs::remove(folder_ / "model-00002-of-00003.safetensors");
  EXPECT_NE(error_of(ErrorClass::kNotFound).find("model-00002"), std::string::npos);
  write_sharded();
  write_safetensors(folder_ / "model-00002-of-00003.safetensors", tensors());  // now some tensors are in two files
  EXPECT_NE(error_of(ErrorClass::kCorruption).find("also in"), std::string::npos);
}

TEST_F(Folder, EveryTruncationIsNoticed) {
  write_single();
  const std::string whole = read_file(folder_ / "model.safetensors");
  for (const double part : {0.0, 0.0001, 0.01, 0.3, 0.7, 0.999}) {
    write_file(folder_ / "model.safetensors",
               whole.substr(0, static_cast<size_t>(part * static_cast<double>(whole.size()))));
    EXPECT_NE(error_of(ErrorClass::kCorruption).find("model.safetensors"), std::string::npos) << part;
  }
}

TEST_F(Folder, SavingAnEditRewritesOnlyItsFile) {
  write_sharded(at::kBFloat16);
  write_file(folder_ / "tokenizer_config.json", "{}");
  write_file(folder_ / "notes.bin", "not copied");
  Model model = load_model(folder_.string());
  const std::string edited = model.edit_site(1).weight_name;
  model.set_weight(edited, model.weight(edited) + 1);
  const fs::path out = root_ / "out";
  EXPECT_EQ(save_model(model, out), (std::vector<std::string>{edited}));
  const Json index = Json::parse(read_file(out / "model.safetensors.index.json"));
  for (int s = 1; s <= 3; ++s) {
    const std::string file = "model-0000" + std::to_string(s) + "-of-00003.safetensors";
    struct stat info {};
    ASSERT_EQ(::stat((out / file).c_str(), &info), 0);
    EXPECT_EQ(info.st_nlink, 1U) << "nothing is shared with the source";
    EXPECT_EQ(read_file(out / file) != read_file(folder_ / file), index["weight_map"][edited] == file);
  }
  EXPECT_EQ(read_file(out / "config.json"), read_file(folder_ / "config.json"));
  EXPECT_TRUE(fs::exists(out / "tokenizer_config.json"));
  EXPECT_FALSE(fs::exists(out / "notes.bin"));
  const Model again = load_model(out.string());
  EXPECT_TRUE(at::equal(again.weight(edited), model.weight(edited).to(at::kBFloat16).to(at::kFloat)));
  EXPECT_EQ(SafetensorsFile(out / index["weight_map"][edited].get<std::string>()).tensors().at(edited).dtype,
            at::kBFloat16);
  // Loading a float32 file in bfloat16 and saving it changes nothing.
  write_sharded();
  EXPECT_TRUE(save_model(load_model(folder_.string(), {.dtype = at::kBFloat16}), root_ / "same").empty());
}

TEST_F(Folder, SavingInAnotherDtypeConvertsEverything) {
  write_sharded();
  const Model model = load_model(folder_.string());
  const auto changed = save_model(model, root_ / "half", at::kHalf);
  EXPECT_EQ(changed.size(), model.weight_names().size());
  const Model again = load_model((root_ / "half").string());
  EXPECT_TRUE(at::equal(again.weight("lm_head.weight"), model.weight("lm_head.weight").to(at::kHalf).to(at::kFloat)));
  EXPECT_EQ(Json::parse(read_file(root_ / "half" / "config.json"))["torch_dtype"], "float16");
  EXPECT_THROW((void)save_model(model, root_ / "x", at::kDouble), Error);
  Model large = load_model(folder_.string());
  large.set_weight("lm_head.weight", large.weight("lm_head.weight") * 1e9);
  EXPECT_THROW((void)save_model(large, root_ / "overflow", at::kHalf), Error);
  EXPECT_FALSE(fs::exists(root_ / "overflow" / "config.json"));
}

TEST_F(Folder, SavingOverAnEarlierSaveLeavesNoStaleFiles) {
  write_sharded();
  (void)save_model(load_model(folder_.string()), root_ / "out");
  (void)save_model(load_model(source_), root_ / "out");  // one file
  EXPECT_FALSE(fs::exists(root_ / "out" / "model.safetensors.index.json"));
  EXPECT_TRUE(at::equal(logits(load_model((root_ / "out").string())), logits(load_model(source_))));
}

TEST_F(Folder, NothingIsSavedOverTheSource) {
  write_single();
  Model model = load_model(folder_.string());
  const std::string edited = model.edit_site(0).weight_name, before = read_file(folder_ / "model.safetensors");
  const at::Tensor unedited = logits(model);
  model.set_weight(edited, model.weight(edited) * 2);
  for (const auto& place : {folder_, folder_ / ".", folder_ / "inside"})
    EXPECT_THROW((void)save_model(model, place), Error) << place;
  EXPECT_EQ(read_file(folder_ / "model.safetensors"), before);
  EXPECT_TRUE(at::equal(unedited, logits(load_model(folder_.string()))));
}

TEST_F(Folder, ATiedEditReachesTheRepeatedHeadInTheFile) {
  write_config({{"tie_word_embeddings", true}});
  auto all = tied_tensors();
  write_safetensors(folder_ / "model.safetensors", all);
  Model model = load_model(folder_.string());
  model.set_weight("model.embed_tokens.weight", model.weight("model.embed_tokens.weight") * 2);
  EXPECT_EQ(save_model(model, root_ / "out").size(), 2u);
  const SafetensorsFile out(root_ / "out" / "model.safetensors");
  EXPECT_TRUE(at::equal(out.tensor("lm_head.weight"), out.tensor("model.embed_tokens.weight")));
}

TEST_F(Folder, AnUnwritableTargetIsAnError) {
  write_single();
  const Model model = load_model(folder_.string());
  write_file(root_ / "file", "");
  EXPECT_THROW((void)save_model(model, root_ / "file" / "inside"), Error);
}

}  // namespace checkpoint_folder_test
}  // namespace emend::models
