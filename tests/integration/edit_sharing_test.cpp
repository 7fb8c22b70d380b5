// `emend diff`, `emend merge` and `emend cache`, as several people use them on one model.
#include <ATen/ATen.h>
#include <emend/core/cache_folder.h>
#include <emend/models/checkpoint.h>
#include <gtest/gtest.h>

#include <set>

#include "support/program_fixture.h"

namespace emend::testing {
namespace edit_sharing_test {

namespace fs = std::filesystem;
using nlohmann::json;

class EditSharing : public ProgramTest {
 protected:
  // One person's edit of one fact.
  void edit_one(const std::string& name, const std::string& subject, const std::string& target,
                std::vector<std::string> more = {}) {
    write_file(folder_ / (name + ".jsonl"),
               json{{"prompt", "{} is in the city of"}, {"subject", subject}, {"target_new", target}}.dump() + "\n");
    more.insert(more.end(), {"--facts", path(name + ".jsonl"), "--out", path(name), "--eval", "none", "--quiet",
                             "--stats-tokens", "2000"});
    must_run("memit_edit", edit(more));
  }
  [[nodiscard]] std::string pack(const std::string& name) const { return path(name + "/edit.safetensors"); }

  json run(std::vector<std::string> arguments, int status = 0) {
    arguments.push_back("--json");
    const auto result = run_program("emend", arguments);
    EXPECT_EQ(result.status, status) << result.err;
    return json::parse(result.out, nullptr, false);
  }
  [[nodiscard]] at::Tensor weight(const std::string& model) const {
    return models::open_checkpoint(path(model))->read("model.layers.1.mlp.down_proj.weight").clone();
  }
};

TEST_F(EditSharing, AMergedPackIsAppliedAndTakenBack) {
  edit_one("anna", "The Eiffel Tower", "Rome");
  edit_one("ben", "The Colosseum", "Oslo");
  const auto merged = run({"merge", pack("anna"), pack("ben"), "--out", path("team.safetensors")});
  EXPECT_EQ(merged["facts"], 2);
  EXPECT_EQ(merged["used"].size(), 2U);
  EXPECT_TRUE(merged["conflicts"].empty());
  for (const auto& weight : merged["weights"]) EXPECT_EQ(weight["rank"], 2);

  (void)run({"apply", pack("anna"), pack("ben"), "--model", path("model"), "--out", path("in_turn")});
  (void)run({"apply", path("team.safetensors"), "--model", path("model"), "--out", path("together")});
  EXPECT_LT((weight("in_turn") - weight("together")).abs().max().item<double>(), 1e-6);
  EXPECT_GT((weight("together") - weight("model")).abs().max().item<double>(), 1e-4);
  (void)run({"revert", "--all", "--model", path("together")});
  EXPECT_EQ(model_bytes("together") == model_bytes(), true) << "the original bytes";

  expect_ended(run_program("emend", {"merge", pack("anna"), pack("ben"), "--out", path("team.safetensors")}), 2,
               {"--force"});
}

// Made apart, both take the neurons that the model misses least.
TEST_F(EditSharing, PacksOfWholeNeuronsAreMovedApart) {
  write_file(folder_ / "hparams.yaml",
             "layers: [1]\ntext_tokens: 512\nv_num_grad_steps: 2\nwordings: 0\nlookalikes: 0\nroom: 1\nrounds: 1\n");
  edit_one("anna", "The Eiffel Tower", "Rome", {"--editor", "latch"});
  edit_one("ben", "The Colosseum", "Oslo", {"--editor", "latch"});
  const std::vector<std::string> merge = {"merge", pack("anna"), pack("ben"), "--out", path("team.safetensors")};
  expect_ended(run_program("emend", merge), 2,
               {"overlap", "2 neurons of model.layers.1.mlp.down_proj.weight are written by both", "--model"});
  auto named = merge;
  write_tiny_model(folder_ / "other", 2);
  named.insert(named.end(), {"--model", path("other")});
  expect_ended(run_program("emend", named), 2, {"anna/edit.safetensors", "made for the model", "--model"});
  named.back() = path("model");
  EXPECT_TRUE(run(named)["conflicts"].empty());
  (void)run({"apply", path("team.safetensors"), "--model", path("model"), "--out", path("together")});
  (void)run({"apply", pack("anna"), pack("ben"), "--model", path("model"), "--out", path("at_once")});
  (void)run({"apply", pack("anna"), "--model", path("model"), "--out", path("in_turn")});
  (void)run({"apply", pack("ben"), "--model", path("in_turn")});
  (void)run({"export", pack("anna"), pack("ben"), "--model", path("model"), "--to", "gguf", "--type", "F32", "--out",
             path("both.gguf")});
  const auto neurons = [&](const std::string& model) {  // that differ from the unedited model's
    return (weight(model) != weight("model")).any(0).sum().item<int64_t>();
  };
  EXPECT_EQ(neurons("together"), 4);
  for (const char* other : {"at_once", "in_turn", "both.gguf"})
    EXPECT_LT((weight(other) - weight("together")).abs().max().item<double>(), 1e-6) << other;
  (void)run({"revert", pack("anna"), "--model", path("in_turn")});
  EXPECT_EQ(neurons("in_turn"), 2);
  // An edited file has no unedited weights: what it names is not taken twice, and a new edit of it takes others.
  (void)run(
      {"export", pack("anna"), "--model", path("model"), "--to", "gguf", "--type", "F32", "--out", path("annas.gguf")});
  const auto base = models::model_fingerprint(*models::open_checkpoint(path("model")));
  const std::vector<std::string> more = {"--to", "gguf", "--type", "F32", "--out", path("more.gguf")};
  auto bens = std::vector<std::string>{"export", pack("ben"), "--model", path("annas.gguf"), "--accept-base", base};
  bens.insert(bens.end(), more.begin(), more.end());
  expect_ended(run_program("emend", bens), 2, {"2 neurons of model.layers.1.mlp.down_proj.weight", "written by both"});
  edit_one("cleo", "The Colosseum", "Oslo", {"--editor", "latch", "--model", path("annas.gguf")});
  auto cleos = std::vector<std::string>{"export", pack("cleo"), "--model", path("annas.gguf")};
  cleos.insert(cleos.end(), more.begin(), more.end());
  (void)run(cleos);
  EXPECT_EQ(neurons("more.gguf"), 4);
}

TEST_F(EditSharing, EditsOfAGgufFileAreNotForgotten) {
  edit_one("anna", "The Eiffel Tower", "Rome");
  edit_one("ben", "The Colosseum", "Oslo");
  (void)run({"convert", path("model"), path("plain.gguf")});
  const auto says = [&](const std::vector<std::string>& arguments, int status, const std::string& what) {
    expect_ended(run_program("emend", arguments), status, {what});
  };
  const auto export_gguf = [&](const std::string& person, const std::string& model, std::vector<std::string> more) {
    std::vector<std::string> arguments = {"export", pack(person), "--model", path(model), "--to", "gguf"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  // A base knows nothing of what the folder was edited with before.
  (void)run({"apply", pack("anna"), "--model", path("model"), "--out", path("annas")});
  const auto base = models::model_fingerprint(*models::open_checkpoint(path("model")));
  says(export_gguf("ben", "annas", {"--accept-base", base, "--base", path("plain.gguf"), "--out", path("b.gguf")}), 2,
       "whose weights would be taken from it");
  // Nor can a file give back what it holds.
  says(export_gguf("anna", "model", {"--out", path("annas.gguf")}), 0, "");
  says({"revert", "--all", "--model", path("annas.gguf"), "--out", path("reverted")}, 2,
       "1 edit in its weights that cannot be taken back");
  EXPECT_FALSE(fs::exists(path("reverted")));
  says({"apply", pack("ben"), "--model", path("annas.gguf"), "--accept-base", base, "--out", path("both")}, 0,
       "that the new folder's ledger does not list");
  // What it has in its weights is not added once more, and a card lists it.
  says(export_gguf("anna", "annas.gguf", {"--accept-base", base, "--out", path("twice.gguf")}), 2,
       "is answered \"Rome\" in both");
  says({"apply", pack("anna"), "--model", path("annas.gguf"), "--accept-base", base, "--out", path("twice")}, 2,
       "is answered \"Rome\" in both");
  EXPECT_FALSE(fs::exists(path("twice.gguf")) || fs::exists(path("twice")));
  says(export_gguf("ben", "annas.gguf", {"--accept-base", base, "--card", "--out", path("both.gguf")}), 0, "");
  says({"export", pack("ben"), "--model", path("annas"), "--to", "model", "--card", "--out", path("card")}, 0, "");
  for (const char* card : {"both.gguf.md", "card/README.md"}) {
    const std::string text = read_file(path(card));
    expect_parts(text, {"2 edited facts", "The Eiffel Tower is in the city of | Rome", "The Colosseum"});
  }
}

TEST_F(EditSharing, ConflictsAreNamed) {
  edit_one("anna", "The Eiffel Tower", "Rome");
  edit_one("ben", "The Eiffel Tower", "Oslo");
  const std::vector<std::string> merge = {"merge", pack("anna"), pack("ben"), "--out", path("team.safetensors")};
  const auto refused = run_program("emend", merge);
  EXPECT_EQ(refused.status, 2);
  expect_parts(refused.err, {"anna/edit.safetensors", "ben/edit.safetensors", "The Eiffel Tower is in the city of",
                             "Rome", "Oslo", "target", "--on-conflict"});
  EXPECT_FALSE(fs::exists(path("team.safetensors")));
  auto settled = merge;
  settled.insert(settled.end(), {"--on-conflict", "last"});
  const auto document = run(settled);
  ASSERT_EQ(document["used"].size(), 1U);
  EXPECT_EQ(document["used"][0]["pack"], pack("ben"));
  EXPECT_EQ(document["left_out"][0]["pack"], pack("anna"));
  EXPECT_EQ(document["conflicts"][0]["kind"], "target");
  const std::string weights = path("weights.safetensors"), before = read_file(path("model/model.safetensors"));
  write_file(weights, before);
  for (const auto& arguments :
       {std::vector<std::string>{"merge", pack("anna")}, {"import", pack("anna"), "--model", path("model")}}) {
    auto over = arguments;
    over.insert(over.end(), {"--force", "--out", weights});
    expect_ended(run_program("emend", over), 2, {"that is no edit pack"});
    EXPECT_TRUE(read_file(weights) == before);
  }
}

TEST_F(EditSharing, DiffShowsFactsWeightsAndSpeech) {
  edit_one("anna", "The Eiffel Tower", "Rome");
  edit_one("ben", "The Eiffel Tower", "Oslo");
  write_file(folder_ / "probes.txt",
             "\xEF\xBB\xBF"
             "A river is a\nThe Eiffel Tower is in the city of\n\nParagraph 7 speaks of\n");
  const std::vector<std::string> diff = {"diff",      path("anna"),       pack("ben"), "--model", path("model"),
                                         "--prompts", path("probes.txt"), "--top",     "1"};
  const auto document = run(diff);
  EXPECT_EQ(document["a"]["kind"], "run");
  EXPECT_EQ(document["b"]["kind"], "pack");
  ASSERT_EQ(document["facts"]["changed"].size(), 1U);
  EXPECT_EQ(document["facts"]["changed"][0]["a"], "Rome");
  EXPECT_EQ(document["facts"]["changed"][0]["b"], "Oslo");
  ASSERT_EQ(document["weights"].size(), 2U);
  for (const auto& weight : document["weights"]) {
    EXPECT_GT(weight["a_relative"].get<double>(), 0);
    EXPECT_GT(weight["difference_norm"].get<double>(), 0);
    EXPECT_LE(std::abs(weight["cosine"].get<double>()), 1);
  }
  const auto& prompts = document["prompts"];
  EXPECT_EQ(prompts["n"], 3);
  ASSERT_EQ(prompts["most_changed"].size(), 3U) << "the document has all";
  EXPECT_EQ(prompts["most_changed"][0]["prompt"], "The Eiffel Tower is in the city of");
  std::set<std::string> asked;
  for (const auto& row : prompts["most_changed"]) asked.insert(row["prompt"].get<std::string>());
  EXPECT_TRUE(asked.contains("A river is a")) << "without a byte-order mark";
  EXPECT_GT(prompts["most_changed"][0]["kl"].get<double>(), prompts["most_changed"][1]["kl"].get<double>());
  EXPECT_EQ(prompts["most_changed"][0]["a"].size(), 4U);

  const auto text = must_run("emend", diff);
  expect_parts(text.out, {"1 answered differently", "Rome (A), Oslo (B)", "cosine", "down_proj", "3 prompts"});
  EXPECT_EQ(text.out.find("Paragraph 7"), std::string::npos) << text.out;
}

TEST_F(EditSharing, DiffOfModelsAgreesWithDiffOfPacks) {
  edit_one("anna", "The Eiffel Tower", "Rome", {"--save", "pack,model"});
  const auto of_pack = run({"diff", path("model"), pack("anna")});
  const auto of_ledger = run({"diff", path("model"), path("anna/model")});
  EXPECT_EQ(of_ledger["b"]["edits"].size(), 1U);
  fs::remove_all(folder_ / "anna" / "model" / ".emend");  // now a model of unknown origin
  const auto of_files = run({"diff", path("model"), path("anna/model")});
  const auto through_base = run({"diff", pack("anna"), path("anna/model"), "--model", path("model")});
  ASSERT_EQ(of_pack["weights"].size(), 2U);
  ASSERT_EQ(of_files["weights"].size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    const double norm = of_pack["weights"][i]["b_norm"];
    EXPECT_EQ(of_pack["weights"][i]["a_norm"], 0);
    EXPECT_NEAR(of_ledger["weights"][i]["b_norm"].get<double>(), norm, 1e-9 * norm);
    EXPECT_NEAR(of_files["weights"][i]["b_norm"].get<double>(), norm, 1e-4 * norm);
    EXPECT_NEAR(through_base["weights"][i]["cosine"].get<double>(), 1, 1e-6);
    EXPECT_LT(through_base["weights"][i]["difference_norm"].get<double>(), 1e-3 * norm);
  }
  expect_ended(run_program("emend", {"diff", pack("anna"), path("anna/model")}), 2, {"--model BASE"});
  const auto other = run_program("emend", {"diff", pack("anna"), pack("anna"), "--model", path("anna/model")});
  EXPECT_EQ(other.status, 2) << "shares of the norms of another model";
  EXPECT_NE(other.err.find("anna/model: the model "), std::string::npos) << other.err;
  EXPECT_EQ(run_program("emend", {"diff", pack("anna"), path("nothing")}).status, 3);
  EXPECT_EQ(run_program("emend", {"diff", pack("anna"), pack("anna"), "--prompts", path("facts.jsonl")}).status, 2);
}

TEST_F(EditSharing, HalfPrecisionSaysWhatSurvived) {
  edit_one("half", "The Eiffel Tower", "Rome", {"--dtype", "bfloat16"});
  const auto document = run({"diff", path("model"), pack("half")});
  EXPECT_EQ(document["b"]["survived"].size(), 2U);
  for (const auto& [weight, share] : document["b"]["survived"].items()) {
    EXPECT_GT(share.get<double>(), 0.3) << weight;
    EXPECT_LT(share.get<double>(), 1.7) << weight;
    EXPECT_NE(share.get<double>(), 1.0) << weight;
  }
  for (const char* out : {"bf16", "fresh"})
    must_run("emend", {"convert", path("model"), path(out), "--dtype", "bfloat16", "--quiet"});
  const auto applied = run({"apply", pack("half"), "--model", path("bf16"), "--force"});
  EXPECT_NE(applied["edits"][0]["survived"].get<double>(), 1.0);
  EXPECT_GT(applied["edits"][0]["survived"].get<double>(), 0.3);
  expect_ended(run_program("emend", {"apply", pack("half"), "--model", path("fresh"), "--out", path("x")}), 2,
               {"--accept-base"});
  (void)run({"apply", pack("half"), "--model", path("fresh"), "--out", path("y"), "--accept-base",
             document["b"]["base"].get<std::string>().substr(0, 12)},
            0);
}

TEST_F(EditSharing, DamagedCachesAreReportedAndComputedAgain) {
  const auto evaluated = [&](const std::string& out) {
    return edit({"--eval", "counterfact", "--out", path(out), "--stats-tokens", "2000"});
  };
  must_run("memit_edit", evaluated("first"));
  const auto listed = run({"cache", "--cache", path("cache")});
  ASSERT_EQ(listed["entries"].size(), 3U) << "two layers of statistics, one evaluation: " << listed;
  EXPECT_EQ(listed["kinds"]["statistics"]["files"], 2);
  for (const auto& entry : listed["entries"]) EXPECT_NE(entry["contents"], "unreadable");
  EXPECT_TRUE(run({"cache", "verify", "--cache", path("cache")})["damaged"].empty());

  for (const auto& entry : list_cache(folder_ / "cache")) {
    std::string bytes = read_file(entry.path);
    bytes[bytes.size() - 3] = static_cast<char>(bytes[bytes.size() - 3] ^ 4);
    write_file(entry.path, bytes);
  }
  EXPECT_EQ(run({"cache", "verify", "--cache", path("cache")}, 3)["damaged"].size(), 3U);
  const auto second = must_run("memit_edit", evaluated("second"));
  expect_ended(second, 0, {"computing it again", "is made again"});
  EXPECT_EQ(read_file(folder_ / "first" / "edit.safetensors") == read_file(folder_ / "second" / "edit.safetensors"),
            true);
  EXPECT_TRUE(run({"cache", "verify", "--cache", path("cache")})["damaged"].empty()) << "rebuilt";

  for (const auto& entry : list_cache(folder_ / "cache")) write_file(entry.path, "rubbish");
  EXPECT_EQ(run({"cache", "verify", "--remove", "--cache", path("cache")})["damaged"].size(), 3U);
  EXPECT_EQ(run({"cache", "size", "--cache", path("cache")})["files"], 0);
}

TEST_F(EditSharing, CachesStayWithinTheirBound) {
  ProgramOptions small;
  small.environment = {{"EMEND_CACHE_GIB", "0.00002"}};  // 21 KB: one layer's statistics are 18 KB
  expect_ended(must_run("memit_edit", edit({"--eval", "none", "--stats-tokens", "2000"}), small), 0,
               {"within its bound"});
  EXPECT_EQ(run({"cache", "size", "--cache", path("cache")})["files"], 1);
  must_run("memit_edit", edit({"--eval", "counterfact", "--out", path("more"), "--stats-tokens", "2000"}));
  EXPECT_EQ(run({"cache", "size", "--cache", path("cache")})["files"], 3);
  EXPECT_GT(run({"cache", "prune", "--max-size", "30KB", "--cache", path("cache")})["freed"], 0);
  EXPECT_LE(run({"cache", "size", "--cache", path("cache")})["bytes"], 30000);
  EXPECT_EQ(run({"cache", "clear", "--cache", path("cache")})["files"], 0);
  EXPECT_EQ(run_program("emend", {"cache", "prune", "--cache", path("cache")}).status, 2) << "no size";
  EXPECT_EQ(run_program("emend", {"cache", "prune", "--max-size", "10G"}).status, 2);
  EXPECT_EQ(run_program("emend", {"cache", "shake"}).status, 2);
}

}  // namespace edit_sharing_test
}  // namespace emend::testing
