// Whatever is applied, reverted and reordered, the weights depend on the packs in force alone, and none in force means
// the original bytes.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/editors/packs/ledger.h>
#include <emend/models/checkpoint.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include <unistd.h>

#include "support/error_of.h"

namespace emend::editors {
namespace ledger_test {

constexpr int kHidden = 8, kWidth = 12;

// A one-layer Llama in a folder, all in one file.
void write_model(const std::filesystem::path& folder, at::ScalarType dtype) {
  std::filesystem::create_directories(folder);
  write_file(
      folder / "config.json",
      R"({"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
                 "vocab_size": 20, "max_position_embeddings": 32, "tie_word_embeddings": true})");
  std::vector<std::pair<std::string, at::Tensor>> tensors = {{"model.embed_tokens.weight", at::randn({20, kHidden})},
                                                             {"model.norm.weight", at::ones({kHidden})}};
  for (int l = 0; l < 2; ++l) {
    const std::string p = "model.layers." + std::to_string(l) + ".";
    for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"})
      tensors.emplace_back(p + name + ".weight", at::randn({kHidden, kHidden}));
    tensors.emplace_back(p + "mlp.gate_proj.weight", at::randn({kWidth, kHidden}));
    tensors.emplace_back(p + "mlp.up_proj.weight", at::randn({kWidth, kHidden}));
    tensors.emplace_back(p + "mlp.down_proj.weight", at::randn({kHidden, kWidth}));
    tensors.emplace_back(p + "input_layernorm.weight", at::ones({kHidden}));
    tensors.emplace_back(p + "post_attention_layernorm.weight", at::ones({kHidden}));
  }
  for (auto& [name, tensor] : tensors) tensor = tensor.to(dtype);
  write_safetensors(folder / "model.safetensors", tensors);
}

struct Said final : LogSink {
  void write(const LogEvent& event) override { text += event.text; }
  std::string text;
};

class LedgerTest : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / ("emend_ledger_test_" + std::to_string(::getpid()));
    std::filesystem::remove_all(folder_);
    at::manual_seed(1);
    write_model(model(), GetParam());
    fingerprint_ = models::model_fingerprint(*models::open_checkpoint(model().string()));
    original_ = read_file(weights());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::filesystem::path model() const { return folder_ / "model"; }
  [[nodiscard]] std::filesystem::path weights() const { return model() / "model.safetensors"; }

  std::filesystem::path make_pack(int number) {
    EditPack pack;
    pack.base_fingerprint = fingerprint_;
    pack.editor = "memit";
    pack.hparams = nlohmann::json::object();
    pack.facts = nlohmann::json::array({{{"subject", "subject " + std::to_string(number)}}});
    pack.extra = nlohmann::json::object();
    for (int l = 0; l < 2; ++l) {
      if ((number + l) % 3 == 0) continue;  // packs touch one layer or both
      WeightDelta delta;
      delta.weight = "model.layers." + std::to_string(l) + ".mlp.down_proj.weight";
      delta.layer = l;
      delta.left_DR = at::randn({kHidden, 2}, at::kDouble);
      delta.right_FR = at::randn({kWidth, 2}, at::kDouble);
      pack.deltas.push_back(delta);
    }
    const auto path = folder_ / ("pack" + std::to_string(number) + ".safetensors");
    save_pack(path, pack);
    return path;
  }

  std::filesystem::path folder_;
  std::string fingerprint_, original_;
};

TEST_P(LedgerTest, RandomSequencesDependOnWhatIsInForceOnly) {
  std::vector<std::filesystem::path> packs;
  for (int i = 0; i < 50; ++i) packs.push_back(make_pack(i));
  std::mt19937 random(7);
  std::map<std::vector<std::string>, std::string> seen;  // packs in force, in order → bytes
  std::vector<std::string> active;
  std::vector<std::filesystem::path> unused = packs;
  Ledger ledger(model());
  for (int step = 0; step < 120; ++step) {
    const int what = static_cast<int>(random() % 5);
    if ((what <= 1 || active.empty()) && !unused.empty()) {
      const size_t pick = random() % unused.size();
      active.push_back(ledger.apply({unused[pick]}).at(0));
      unused.erase(unused.begin() + static_cast<long>(pick));
    } else if (what <= 3 && !active.empty()) {
      const size_t pick = random() % active.size();
      ledger.revert({active[pick]});
      active.erase(active.begin() + static_cast<long>(pick));
    } else if (active.size() > 1) {
      std::shuffle(active.begin(), active.end(), random);
      ledger.reorder(active);
    }
    const std::string bytes = read_file(weights());
    const auto [it, fresh] = seen.emplace(active, bytes);
    ASSERT_EQ(it->second, bytes) << "the same packs in the same order gave other weights at step " << step;
    if (active.empty())
      ASSERT_EQ(bytes, original_);
    else
      ASSERT_NE(bytes, original_);
  }
  ledger.revert_all();
  EXPECT_EQ(read_file(weights()), original_);
  EXPECT_EQ(models::model_fingerprint(*models::open_checkpoint(model().string())), fingerprint_);
}

TEST_P(LedgerTest, AnyOrderOfRevertsLeavesTheSameWeights) {
  std::vector<std::string> ids;
  {
    Ledger ledger(model());
    for (int i = 0; i < 5; ++i) ids.push_back(ledger.apply({make_pack(i)}).at(0));
  }
  const auto revert = [&](std::vector<int> order) {
    Ledger ledger(model());
    for (int i : order) ledger.revert({ids[i]});
    const std::string bytes = read_file(weights());
    return bytes;
  };
  const std::string first = revert({1, 3, 4});
  {
    Ledger ledger(model());
    for (int i : {1, 3, 4}) ledger.apply({folder_ / ("pack" + std::to_string(i) + ".safetensors")});
    ledger.reorder({ids[0], ids[1], ids[2], ids[3], ids[4]});
  }
  EXPECT_EQ(revert({4, 1, 3}), first);
}

TEST_P(LedgerTest, FinishesAnInterruptedChange) {
  std::string id;
  {
    Ledger ledger(model());
    id = ledger.apply({make_pack(1)}).at(0);
  }
  const std::string edited = read_file(weights());
  // As if the process had died after announcing the revert and before writing any weight.
  const auto state_path = model() / ".emend" / "ledger.json";
  auto state = nlohmann::json::parse(read_file(state_path));
  state["pending"] = nlohmann::json::array();
  auto believed = state;
  believed["packs"][id]["weights"] = nlohmann::json::array();
  write_file(state_path, believed.dump());
  EXPECT_THROW((void)Ledger(model()), Error) << "a list that was changed by hand";
  state.erase("checksum");  // as earlier versions wrote it
  write_file(state_path, state.dump());
  EXPECT_EQ(read_file(weights()), edited);
  EXPECT_THROW((void)lineage_of(model()), Error) << "nobody knows what the weights hold";
  {
    const Ledger ledger(model());
    EXPECT_FALSE(ledger.entries().at(0).active);
  }
  EXPECT_EQ(read_file(weights()), original_);
}

TEST_P(LedgerTest, RefusesWhatDoesNotFitAndLeavesNoTrace) {
  const auto path = make_pack(1);
  {
    Ledger ledger(model());
    EXPECT_THROW(ledger.revert({"abc"}), Error);
    EditPack pack = load_pack(path);
    pack.base_fingerprint = std::string(64, '0');
    save_pack(path, pack);
    EXPECT_THROW(ledger.apply({path}), Error);
    pack.base_fingerprint = fingerprint_;
    pack.deltas[0].left_DR = at::randn({kHidden + 1, 2}, at::kDouble);
    save_pack(path, pack);
    EXPECT_THROW(ledger.apply({path}), Error);
    EXPECT_THROW(Ledger(model()).apply({make_pack(2)}), Error) << "another one holds the lock";
  }
  EXPECT_EQ(read_file(weights()), original_);
  EXPECT_FALSE(std::filesystem::exists(model() / ".emend"));
}

// Another program's work, in the weights that edits changed or in others, is neither written over nor half undone.
TEST_P(LedgerTest, ChangesTheFilesThatTheModelIsReadFromAlone) {
  for (const char* copy : {"backup.safetensors", "a.safetensors", "model.fp16.safetensors", "zz.safetensors"})
    std::filesystem::copy_file(weights(), model() / copy);
  std::filesystem::permissions(weights(), std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  Ledger ledger(model());
  const auto id = ledger.apply({make_pack(1)}).at(0);
  EXPECT_NE(read_file(weights()), original_);
  for (const char* copy : {"backup.safetensors", "a.safetensors", "model.fp16.safetensors", "zz.safetensors"})
    EXPECT_EQ(read_file(model() / copy), original_) << copy;
  for (const auto& path : {weights(), model() / ".emend" / "originals.safetensors"})
    EXPECT_EQ(std::filesystem::status(path).permissions() & std::filesystem::perms::others_read,
              std::filesystem::perms::none)
        << path << " is as private as before";
  ledger.revert({id});
  EXPECT_EQ(read_file(weights()), original_);
}

TEST_P(LedgerTest, AChangeBeyondTheFilesTypeIsRefused) {
  auto pack = load_pack(make_pack(1));
  pack.deltas.at(0).left_DR.fill_(GetParam() == at::kHalf ? 1e5 : 1e39);
  save_pack(folder_ / "large.safetensors", pack);
  const auto apply = [&] { (void)Ledger(model()).apply({folder_ / "large.safetensors"}); };
  (void)testing::error_of(apply, ErrorClass::kNumeric);
  EXPECT_EQ(read_file(weights()), original_);
  EXPECT_TRUE(Ledger(model()).entries().empty());
}

TEST_P(LedgerTest, NothingChangesWhereAnotherProgramHasChangedTheWeights) {
  const auto first = make_pack(1), second = make_pack(2);
  Ledger(model()).apply({first});
  const auto damage = [&](const std::string& weight) {
    const at::Tensor there = SafetensorsFile(weights()).tensor(weight).clone();
    patch_safetensors(weights(), folder_ / "patched", {{weight, there + 0.5}});
    std::filesystem::rename(folder_ / "patched", weights());
  };
  const auto expect_refused = [&](const auto& change, const std::string& what) {
    const auto bytes = read_file(weights()), state = read_file(model() / ".emend" / "ledger.json");
    const auto attempt = [&] {
      Ledger ledger(model());
      change(ledger);
    };
    testing::expect_parts(testing::error_of(attempt, ErrorClass::kCorruption), {what});
    EXPECT_TRUE(bytes == read_file(weights()));
    EXPECT_EQ(state, read_file(model() / ".emend" / "ledger.json"));
    EXPECT_TRUE(Ledger(model()).entries()[0].active);
  };
  const auto apply = [&](Ledger& ledger) { ledger.apply({second}); };
  const auto revert = [&](Ledger& ledger) { ledger.revert({first.string()}); };
  const auto whole = read_file(weights());
  damage("model.layers.0.mlp.down_proj.weight");
  expect_refused(apply, "another program has changed \"model.layers.0.mlp.down_proj.weight\"");
  expect_refused(revert, "reverting all edits");
  const auto originals = model() / ".emend" / "originals.safetensors";
  std::filesystem::rename(originals, folder_ / "away");
  write_file(weights(), whole);
  EXPECT_THROW(Ledger(model()).apply({second}), Error) << "edited weights are no originals";
  std::filesystem::rename(folder_ / "away", originals);
  damage("model.layers.0.mlp.down_proj.weight");
  Ledger(model()).revert_all();  // writes what it has kept
  EXPECT_TRUE(original_ == read_file(weights()));
  Ledger(model()).apply({first});
  damage("model.norm.weight");
  const auto sink = std::make_shared<Said>();
  Ledger(model(), Log({sink})).revert_all();
  const std::string& said = sink->text;
  EXPECT_NE(said.find("without any edit this is the model"), std::string::npos) << said;
  EXPECT_FALSE(Ledger(model()).entries()[0].active);
}

// What the folder holds while no edit touches a weight is its original, not what an edit before found there.
TEST_P(LedgerTest, WorkBetweenTwoEditsIsNotUndone) {
  const auto first = make_pack(1), of_before = make_pack(4);
  Ledger(model()).apply({first});
  EXPECT_EQ(lineage_of(model()).base, fingerprint_);
  Ledger(model()).revert_all();
  EXPECT_EQ(lineage_of(model()).base, "") << "what stands there is the original";
  const std::string weight = "model.layers.0.mlp.down_proj.weight";
  patch_safetensors(weights(), folder_ / "patched", {{weight, SafetensorsFile(weights()).tensor(weight) + 0.5}});
  std::filesystem::rename(folder_ / "patched", weights());
  const auto between = read_file(weights());
  EXPECT_THROW(Ledger(model()).apply({of_before}), Error) << "the folder holds another model now";
  fingerprint_ = models::model_fingerprint(*models::open_checkpoint(model().string()));
  const auto second = make_pack(2), third = make_pack(5);
  const auto sink = std::make_shared<Said>();
  Ledger(model(), Log({sink})).apply({second});
  EXPECT_EQ(lineage_of(model()).base, fingerprint_);
  const auto twice = [&] { Ledger(model()).apply({third, third}); };
  testing::expect_parts(testing::error_of(twice, ErrorClass::kInvalidArgument), {"named twice"});
  EXPECT_NE(sink->text.find("another program has changed \"" + weight + "\" since"), std::string::npos) << sink->text;
  Ledger(model()).revert_all();
  EXPECT_TRUE(between == read_file(weights()));
}

// A pack of the same model in another form names the weights without the family's prefix.
// What the originals hold is the only copy.
TEST_P(LedgerTest, OriginalsAreNeitherWrittenOverNorThrownAway) {
  const auto state = model() / ".emend" / "ledger.json", originals = model() / ".emend" / "originals.safetensors";
  const auto said = [](const auto& what) { return testing::error_of(what, ErrorClass::kCorruption); };
  (void)Ledger(model()).apply({make_pack(1)});
  const auto edited = read_file(weights()), kept = read_file(originals), list = read_file(state);
  std::filesystem::remove(state);
  EXPECT_NE(said([&] { (void)Ledger(model()).apply({make_pack(2)}, {.force = true}); }).find("put the file back"),
            std::string::npos);
  EXPECT_EQ(read_file(originals), kept);
  EXPECT_EQ(read_file(weights()), edited);
  write_file(state, list);
  auto damaged = kept;
  damaged[damaged.size() - 3] ^= 1;
  write_file(originals, damaged);
  const auto text = said([&] { Ledger(model()).revert_all(); });
  EXPECT_NE(text.find("nothing else holds"), std::string::npos) << text;
  EXPECT_EQ(text.find("delete"), std::string::npos) << text;
  write_file(originals, kept);
  Ledger(model()).revert_all();
  EXPECT_EQ(read_file(weights()), original_);
}

// Some files hold a tied head a second time.
TEST_P(LedgerTest, ATiedHeadFollowsTheEmbedding) {
  const SafetensorsFile plain(weights());
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& [name, info] : plain.tensors()) tensors.emplace_back(name, plain.tensor(name).clone());
  const std::string embedding = "model.embed_tokens.weight", head = "lm_head.weight";
  tensors.emplace_back(head, plain.tensor(embedding).clone());
  write_safetensors(weights(), tensors);
  const auto before = read_file(weights());
  fingerprint_ = models::model_fingerprint(*models::open_checkpoint(model().string()));
  EditPack pack = load_pack(make_pack(1));
  pack.deltas.resize(1);
  pack.deltas[0] = {};
  pack.deltas[0].weight = embedding;
  pack.deltas[0].left_DR = at::randn({20, 2}, at::kDouble);
  pack.deltas[0].right_FR = at::randn({kHidden, 2}, at::kDouble);
  const auto path = folder_ / "embedding.safetensors";
  save_pack(path, pack);
  (void)Ledger(model()).apply({path});
  const SafetensorsFile edited(weights());
  EXPECT_FALSE(at::equal(edited.tensor(embedding), plain.tensor(embedding)));
  EXPECT_TRUE(at::equal(edited.tensor(embedding), edited.tensor(head)));
  Ledger(model()).revert_all();
  EXPECT_EQ(read_file(weights()), before);
}

TEST_P(LedgerTest, NamesMayLackThePrefix) {
  const auto first = make_pack(1), second = make_pack(2);
  EditPack pack = load_pack(second);
  for (auto& delta : pack.deltas) delta.weight = delta.weight.substr(std::string("model.").size());
  const auto bare = folder_ / "bare.safetensors";
  save_pack(bare, pack);
  Ledger(model()).apply({first, second});
  const auto expected = read_file(weights());
  Ledger(model()).revert_all();
  Ledger(model()).apply({first});
  const auto ids = Ledger(model()).apply({bare});
  EXPECT_TRUE(expected == read_file(weights()));
  Ledger(model()).revert(ids);
  Ledger(model()).revert_all();
  EXPECT_TRUE(original_ == read_file(weights()));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, LedgerTest, ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

}  // namespace ledger_test
}  // namespace emend::editors
