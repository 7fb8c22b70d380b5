// Edits beside the weights through the programs: edit, evaluate, generate with a pack, apply and revert in a folder.
#include <emend/core/text.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "support/program_fixture.h"

namespace emend::testing {
namespace runtime_program_test {

using nlohmann::json;

class RuntimeProgramTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    write_file(folder_ / "grace.yaml", "layers: [2]\neps: 0.05\nval_init: warm\nn_iter: 60\nedit_lr: 0.3\n");
    write_file(folder_ / "ike.yaml", "k: 1\nthreshold: 0.9\n");
  }
  [[nodiscard]] std::string continuation(const std::string& model, std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {
        "generate",      "--model", path(model), "--prompt", "The capital of France is", "--max-new-tokens", "4",
        "--temperature", "0",       "--json",    "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto result = must_run("emend", arguments);
    return result.status == 0 ? json::parse(result.out)[0]["ids"].dump() : "";
  }
};

TEST_F(RuntimeProgramTest, GraceFromEditToRevert) {
  const std::string original = model_bytes(), plain = continuation("model");
  auto result = must_run("memit_edit", edit({"--editor", "grace", "--hparams", path("grace.yaml"), "--save",
                                             "pack,model", "--eval", "counterfact", "--json", "--quiet"}));
  const json results = json::parse(result.out);
  EXPECT_TRUE(results["weights_changed"].empty());
  const auto& metrics = results["metrics"]["counterfact"];
  EXPECT_GT(metrics["post"]["efficacy_magnitude"].get<double>(), 2 * metrics["pre"]["efficacy_magnitude"].get<double>())
      << "the evaluation sees the edit";
  const std::string pack = path("run/edit.safetensors");

  const std::string edited = continuation("model", {"--pack", pack});
  EXPECT_NE(edited, plain);
  EXPECT_EQ(continuation("model"), plain);
  // In the ledger of a folder: files keep their bytes, generate loads the edit by itself.
  EXPECT_EQ(model_bytes("run/model"), original);
  EXPECT_EQ(continuation("run/model"), edited);
  result = must_run("emend", {"revert", pack, "--model", path("run/model")});
  EXPECT_EQ(continuation("run/model"), plain);
  result = must_run("emend", {"apply", pack, "--model", path("run/model")});
  EXPECT_EQ(continuation("run/model"), edited);

  // Another pack in the place of the one that was applied.
  const auto other = must_run("memit_edit", edit({"--editor", "grace", "--hparams", path("grace.yaml"), "--limit", "1",
                                                  "--eval", "none", "--quiet", "--out", path("other")}));
  for (const auto& second : {pack, path("other/edit.safetensors")}) {
    result = run_program("emend", {"diff", pack, second, "--json"});
    EXPECT_EQ(json::parse(result.out)["beside"],
              json::parse(R"([{"kind": "grace", "in_a": true, "in_b": true, "same": )" +
                          std::string(second == pack ? "true}]" : "false}]")));
  }
  for (const std::string verb : {"trace", "stats"}) {  // of the weights alone, and says so
    std::vector<std::string> words = {verb, "--model", path("run/model")};
    if (verb == "trace")
      words.insert(words.end(), {"--prompt", "The capital of {} is", "--subject", "France", "--samples", "1"});
    else
      words.insert(words.end(), {"--layers", "1", "--corpus", path("corpus.txt"), "--cache", path("cache")});
    result = must_run("emend", words);
    expect_ended(result, 0, {"they take no part in this run"});
  }
  std::filesystem::copy(path("run/model"), path("swapped"), std::filesystem::copy_options::recursive);
  for (const auto& entry : std::filesystem::directory_iterator(path("swapped/.emend/packs")))
    std::filesystem::copy_file(path("other/edit.safetensors"), entry,
                               std::filesystem::copy_options::overwrite_existing);
  expect_ended(run_program("emend", {"generate", "--model", path("swapped"), "--prompt", "a", "--max-new-tokens", "1"}),
               3, {"put the pack back"});

  result = must_run("emend", {"eval", "--model", path("model"), "--facts", path("facts.jsonl"), "--pack", pack,
                              "--cache", path("cache"), "--eval", "counterfact", "--json", "--quiet"});
  const json evaluated = json::parse(result.out)["metrics"];
  EXPECT_NEAR(evaluated["post"]["counterfact"]["efficacy_magnitude"].get<double>(),
              metrics["post"]["efficacy_magnitude"].get<double>(), 0.02);
}

TEST_F(RuntimeProgramTest, WhatCannotHoldSuchAnEditSaysSo) {
  const auto result = run_program("memit_edit", edit({"--editor", "grace", "--hparams", path("grace.yaml"), "--save",
                                                      "pack,peft", "--eval", "none", "--quiet"}));
  EXPECT_NE(result.status, 0);
  EXPECT_NE(result.err.find("beside the weights"), std::string::npos) << result.err;
}

TEST_F(RuntimeProgramTest, IkeStandsInFrontOfThePrompt) {
  const std::string plain = continuation("model");
  const auto result = must_run("memit_edit", edit({"--editor", "ike", "--hparams", path("ike.yaml"), "--save", "pack",
                                                   "--eval", "counterfact", "--json", "--quiet"}));
  const auto metrics = json::parse(result.out)["metrics"]["counterfact"];
  EXPECT_NE(metrics["post"]["efficacy_magnitude"], metrics["pre"]["efficacy_magnitude"]);
  EXPECT_NE(continuation("model", {"--pack", path("run/edit.safetensors")}), "");
  EXPECT_EQ(continuation("model"), plain);
  std::string ids;
  for (const char byte : std::string("The Eiffel Tower is in the city of")) append_item(ids, std::to_string(byte), ",");
  expect_ended(run_program("emend", {"generate", "--model", path("model"), "--pack", path("run/edit.safetensors"),
                                     "--ids", ids, "--quiet"}),
               2, {"--prompt"});
}

}  // namespace runtime_program_test
}  // namespace emend::testing
