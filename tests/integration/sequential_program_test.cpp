// Many batches on the live model: the editor's memory and the measurements between batches outlive an interruption.
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "support/program_fixture.h"

namespace emend::testing {
namespace sequential_program_test {

using nlohmann::json;

struct Sequence {
  const char* editor;
  std::string hparams;
};

class SequentialProgramTest : public ProgramTest, public ::testing::WithParamInterface<Sequence> {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    write_file(folder_ / "sequence.yaml",
               "layers: [1, 2]\nclamp_norm_factor: 4\nv_num_grad_steps: 8\nv_lr: 0.5\nv_loss_layer: 3\n"
               "v_weight_decay: 0.001\n" +
                   GetParam().hparams);
    std::string facts;
    for (const auto& [subject, target] :
         {std::pair("Oslo", "Rome"), std::pair("Paris", "Ur"), std::pair("Cairo", "Bern"), std::pair("Lima", "Oslo"),
          std::pair("Quito", "Riga")})
      facts += "{\"prompt\": \"{} is twinned with\", \"subject\": \"" + std::string(subject) +
               "\", \"target_new\": \"" + target + "\"}\n";
    write_file(folder_ / "sequence.jsonl", facts);
  }
  [[nodiscard]] std::vector<std::string> sequence(const std::string& out, std::vector<std::string> more = {}) const {
    more.insert(more.end(), {"--editor", GetParam().editor, "--hparams", path("sequence.yaml"), "--facts",
                             path("sequence.jsonl"), "--batch-size", "2", "--eval", "none", "--eval-at", "every=2",
                             "--seed", "5", "--out", path(out), "--show", "0"});
    return edit(more);
  }
};

TEST_P(SequentialProgramTest, ResumesToTheSamePackAndMeasurements) {
  const auto whole = run_program("memit_edit", sequence("whole"));
  ASSERT_EQ(whole.status, 0) << whole.err;
  ProgramOptions options;
  options.signal_when = "edited facts 1-2";
  const auto interrupted = run_program("memit_edit", sequence("cut"), options);
  if (interrupted.status == 0) GTEST_SKIP() << "the run ended before the signal reached it";
  ASSERT_EQ(interrupted.status, 130) << interrupted.err;
  const auto resumed = run_program("memit_edit", sequence("cut", {"--resume"}));
  ASSERT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_NE(resumed.err.find("finished batches"), std::string::npos) << resumed.err;
  EXPECT_TRUE(read_file(folder_ / "cut" / "edit.safetensors") == read_file(folder_ / "whole" / "edit.safetensors"));

  const json one = json::parse(read_file(folder_ / "whole" / "results.json")),
             two = json::parse(read_file(folder_ / "cut" / "results.json"));
  EXPECT_EQ(one["retention"]["edits_applied"], json({2, 4}));
  EXPECT_EQ(two["retention"], one["retention"]);
  EXPECT_EQ(two["cache"]["layers_computed"], json::array()) << "not the statistics of the unedited model";
  EXPECT_EQ(two["edits"], one["edits"]);
  const bool corrects = std::string(GetParam().editor) == "prune";
  EXPECT_EQ(one["batches"], corrects ? 4 : 3);
  EXPECT_EQ(whole.err.find("corrected the sum") != std::string::npos, corrects) << whole.err;
}

INSTANTIATE_TEST_SUITE_P(Editors, SequentialProgramTest,
                         ::testing::Values(Sequence{"alphaedit", "nullspace_threshold: 1e9\nL2: 1\n"},
                                           Sequence{"sphere", "nullspace_threshold: 1e9\nL2: 1\n"},
                                           Sequence{"memit-seq", "mom2_update_weight: 10\n"},
                                           Sequence{"nse", "mom2_update_weight: 10\nneuron_threshold: 0.8\n"},
                                           Sequence{"rect", "mom2_update_weight: 10\n"},
                                           // So large a change that the restraint has something to do.
                                           Sequence{"prune", "mom2_update_weight: 1e-3\nrestraint_base: 1000\n"}),
                         [](const auto& info) {
                           std::string name = info.param.editor;
                           std::erase(name, '-');
                           return name;
                         });

// Each fact edited from the unedited model, judged and taken back: what as many runs of one fact give.
class SingleProtocolTest : public ProgramTest, public ::testing::WithParamInterface<Sequence> {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    write_file(folder_ / "single.yaml",
               "clamp_norm_factor: 4\nv_num_grad_steps: 6\nv_lr: 0.5\nv_loss_layer: 3\nv_weight_decay: 0.001\n" +
                   GetParam().hparams);
    std::string facts;
    for (const char* subject : {"Oslo", "Paris", "Lima"})
      facts += "{\"prompt\": \"{} is twinned with\", \"subject\": \"" + std::string(subject) +
               "\", \"target_new\": \"Rome\", \"target_true\": \"Bern\"}\n";
    write_file(folder_ / "single.jsonl", facts);
  }
  [[nodiscard]] std::vector<std::string> run(const std::string& out, std::vector<std::string> more) const {
    more.insert(more.end(),
                {"--editor", GetParam().editor, "--hparams", path("single.yaml"), "--facts", path("single.jsonl"),
                 "--eval", "counterfact", "--seed", "5", "--out", path(out), "--show", "1"});
    return edit(more);
  }
  [[nodiscard]] std::vector<json> cases(const std::string& out) const {
    std::vector<json> all;
    std::istringstream lines(read_file(folder_ / out / "cases.jsonl"));
    for (std::string line; std::getline(lines, line);) all.push_back(json::parse(line));
    return all;
  }
};

// Mean −log p of a target after the fact's own prompt.
double surprise(const json& metrics, const char* target) {
  return metrics["counterfact"]["rewrite_prompts_probs"][0][target];
}

TEST_P(SingleProtocolTest, EqualsRunsOfOneFact) {
  const auto together = run_program("memit_edit", run("together", {"--protocol", "single"}));
  ASSERT_EQ(together.status, 0) << together.err;
  const auto judged = cases("together");
  ASSERT_EQ(judged.size(), 3u);
  for (size_t i = 0; i < judged.size(); ++i) {
    const std::string out = "alone" + std::to_string(i);
    const auto alone = run_program("memit_edit", run(out, {"--offset", std::to_string(i), "--limit", "1"}));
    ASSERT_EQ(alone.status, 0) << alone.err;
    const auto one = cases(out).at(0)["metrics"], same = judged[i]["metrics"];
    for (const char* target : {"target_new", "target_true"}) {
      EXPECT_NEAR(surprise(same["pre"], target), surprise(one["pre"], target), 1e-5);
      EXPECT_NEAR(surprise(same["post"], target), surprise(one["post"], target), 1e-4);
    }
    EXPECT_GT(std::abs(surprise(one["post"], "target_new") - surprise(one["pre"], "target_new")), 0.01)
        << "an edit that does nothing shows nothing";
  }
  const json results = json::parse(read_file(folder_ / "together" / "results.json"));
  EXPECT_EQ(results["protocol"], "single");
  EXPECT_EQ(results["weights_changed"], json::array());
  EXPECT_FALSE(std::filesystem::exists(folder_ / "together" / "edit.safetensors"));
}

// What the collapse guard takes back is judged as what it is then: unedited.
TEST_P(SingleProtocolTest, JudgesWhatWasTakenBackAsUnedited) {
  for (const char* on_collapse : {"skip", "stop"}) {
    const auto guarded = run_program(
        "memit_edit", run(on_collapse, {"--protocol", "single", "--max-update", "1e-9", "--on-collapse", on_collapse}));
    ASSERT_NE(guarded.err.find("may be broken"), std::string::npos) << guarded.err;
    const auto judged = cases(on_collapse);
    ASSERT_EQ(judged.size(), 3u);
    for (const auto& fact : judged)
      for (const char* target : {"target_new", "target_true"})
        EXPECT_NEAR(surprise(fact["metrics"]["post"], target), surprise(fact["metrics"]["pre"], target), 1e-5);
  }
}

TEST_P(SingleProtocolTest, ResumesToTheSameNumbers) {
  const auto whole = run_program("memit_edit", run("whole", {"--protocol", "single"}));
  ASSERT_EQ(whole.status, 0) << whole.err;
  ProgramOptions options;
  options.signal_when = "edited facts 2-2";
  const auto interrupted = run_program("memit_edit", run("cut", {"--protocol", "single"}), options);
  if (interrupted.status == 0) GTEST_SKIP() << "the run ended before the signal reached it";
  ASSERT_EQ(interrupted.status, 130) << interrupted.err;
  const auto resumed = run_program("memit_edit", run("cut", {"--protocol", "single", "--resume"}));
  ASSERT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_NE(resumed.err.find("finished batches"), std::string::npos) << resumed.err;
  const auto one = cases("whole"), two = cases("cut");
  ASSERT_EQ(one.size(), two.size());
  for (size_t i = 0; i < one.size(); ++i)
    EXPECT_NEAR(surprise(two[i]["metrics"]["post"], "target_new"), surprise(one[i]["metrics"]["post"], "target_new"),
                1e-5);
}

TEST_P(SingleProtocolTest, RefusesWhatHasNoMeaning) {
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{"--save", "model"}, {"--eval-at", "each"}, {"--eval", "health"}}) {
    auto given = run("refused", {"--protocol", "single"});
    given.insert(given.end(), more.begin(), more.end());
    const auto refused = run_program("memit_edit", given);
    EXPECT_EQ(refused.status, 2) << refused.out << refused.err;
    EXPECT_NE(refused.err.find("protocol"), std::string::npos) << refused.err;
  }
}

INSTANTIATE_TEST_SUITE_P(Editors, SingleProtocolTest,
                         ::testing::Values(Sequence{"rome", "layers: [1]\n"},
                                           Sequence{"prune",
                                                    "layers: [1, 2]\nmom2_update_weight: 10\n"
                                                    "restraint_base: 1000\n"}),
                         [](const auto& info) { return std::string(info.param.editor); });

}  // namespace sequential_program_test
}  // namespace emend::testing
