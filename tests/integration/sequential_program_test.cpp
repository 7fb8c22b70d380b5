// Many batches on the live model: the editor's memory and the measurements between batches outlive an interruption.
#include <gtest/gtest.h>

#include <cmath>

#include "support/program_fixture.h"
#include "support/python.h"

namespace emend::testing {
namespace sequential_program_test {

using nlohmann::json;

struct Sequence {
  const char* editor;
  std::string hparams;
  [[nodiscard]] std::string file() const {
    return "layers: [1, 2]\nclamp_norm_factor: 4\nv_num_grad_steps: 8\nv_lr: 0.5\nv_loss_layer: 3\n"
           "v_weight_decay: 0.001\n" +
           hparams;
  }
};

class SequentialProgramTest : public ProgramTest, public ::testing::WithParamInterface<Sequence> {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    write_file(folder_ / "sequence.yaml", GetParam().file());
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
  const auto whole = must_run("memit_edit", sequence("whole"));
  ProgramOptions options;
  options.signal_when = "edited facts 1-2";
  const auto interrupted = run_program("memit_edit", sequence("cut"), options);
  if (interrupted.status == 0) GTEST_SKIP() << "the run ended before the signal reached it";
  ASSERT_EQ(interrupted.status, 130) << interrupted.err;
  expect_ended(must_run("memit_edit", sequence("cut", {"--resume"})), 0, {"finished batches"});
  EXPECT_TRUE(read_file(folder_ / "cut" / "edit.safetensors") == read_file(folder_ / "whole" / "edit.safetensors"));

  const json one = results("whole"), two = results("cut");
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
                                           Sequence{"rect", "mom2_update_weight: 10\nhistory: true\n"},
                                           Sequence{"rlsedit", "mom2_update_weight: 10\nnas: true\nrevive: 0.2\n"},
                                           // So large a change that the restraint has something to do.
                                           Sequence{"prune", "mom2_update_weight: 1e-3\nrestraint_base: 1000\n"}),
                         [](const auto& info) {
                           std::string name = info.param.editor;
                           std::erase(name, '-');
                           return name;
                         });

// A sequence that is measured on the way.
class LifelongTest : public ProgramTest, public ::testing::WithParamInterface<Sequence> {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    write_file(folder_ / "sequence.yaml", GetParam().file());
    write_cities("sequence.jsonl");
  }
  [[nodiscard]] ProgramResult run(const std::string& out, const std::vector<std::string>& more = {},
                                  const ProgramOptions& options = {}) const {
    std::vector<std::string> all = {"--protocol",    "lifelong",
                                    "--editor",      GetParam().editor,
                                    "--hparams",     path("sequence.yaml"),
                                    "--facts",       path("sequence.jsonl"),
                                    "--batch-size",  "2",
                                    "--health-data", path("health"),
                                    "--seed",        "5",
                                    "--out",         path(out),
                                    "--show",        "0"};
    if (std::find(more.begin(), more.end(), "--eval") == more.end()) all.insert(all.end(), {"--eval", "none"});
    all.insert(all.end(), more.begin(), more.end());
    return run_program("memit_edit", edit(all), options);
  }
  // What two equal runs have in common.
  [[nodiscard]] json measured(const std::string& out) const {
    json entries = results(out).at("lifelong");
    for (auto& entry : entries) entry.erase("seconds"), entry.erase("peak_bytes");
    return entries;
  }
};

TEST_P(LifelongTest, MeasuresWhatEarlierEditsStillHold) {
  const auto done = run("whole", {"--eval-at", "every=2", "--eval", "counterfact"});
  ASSERT_EQ(done.status, 0) << done.err;
  const json document = results("whole"), &entries = document["lifelong"];
  ASSERT_EQ(entries.size(), 3u);
  double seconds = 0;
  for (size_t i = 0; i < 3; ++i) {
    const json& entry = entries[i];
    EXPECT_EQ(entry["edits"], std::vector<int>({2, 4, 5})[i]);
    EXPECT_EQ(entry["first"], entry["all"]) << "fewer than a hundred: all of them";
    EXPECT_EQ(entry["last"], entry["all"]);
    EXPECT_EQ(entry["free"]["n"], entry["edits"]);
    EXPECT_TRUE(entry["free"]["edit_begins"].is_number()) << entry;
    EXPECT_GT(entry["free"].value("neutral_kl", 0.0), 0) << entry;
    EXPECT_NEAR(entry["health"].value("divergence", 0.0), entry["free"].value("neutral_kl", 1.0), 1e-9);
    EXPECT_TRUE(entry["health"]["lambada"].is_number()) << entry;
    EXPECT_GT(entry["health"]["wikitext2_perplexity"], 1);
    EXPECT_GT(entry["seconds"], seconds);
    seconds = entry["seconds"];
    EXPECT_GT(entry["peak_bytes"]["host"], 0);
  }
  // The last state is the one that is evaluated in full.
  const json& last = document["metrics"]["counterfact"]["post"];
  EXPECT_EQ(entries[2]["all"], last["efficacy_success"]);
  EXPECT_EQ(entries[2]["paraphrase"], last["paraphrase_success"]);
  EXPECT_EQ(entries[2]["neighborhood"], last["neighborhood_success"]);
  EXPECT_NE(done.err.find("after 4 edits: first "), std::string::npos) << done.err;
  EXPECT_NE(done.out.find("LAMBADA"), std::string::npos) << done.out;
  const auto table = must_run("emend", {"bench", "--quality", "--out", folder_.string()});
  EXPECT_NE(table.out.find("| whole | 5 |"), std::string::npos) << table.out;
  const std::string page = read_file(folder_ / "whole" / "report.html"), mark = "id=\"data\">";
  const size_t begin = page.find(mark);
  ASSERT_NE(begin, std::string::npos);
  const auto shown =
      nlohmann::json::parse(page.substr(begin + mark.size(), page.find("</script>", begin) - begin - mark.size()));
  EXPECT_EQ(shown["results"]["lifelong"], entries);
}

// Killed without warning, at whatever moment: the pack and the measurements are those of a run that was left alone.
TEST_P(LifelongTest, SurvivesBeingKilled) {
  ASSERT_EQ(run("whole", {"--eval-at", "every=2"}).status, 0);
  ProgramOptions options;
  options.signal = SIGKILL;
  int killed = 0;
  const char* moments[] = {"edited facts 1-2", "after 2 edits", "edited facts 3-4", "edited facts 5-5"};
  for (const char* moment : moments) {
    options.signal_when = moment;
    std::vector<std::string> more = {"--eval-at", "every=2"};
    if (std::filesystem::exists(folder_ / "cut")) more.emplace_back("--resume");
    const auto cut = run("cut", more, options);
    if (cut.status == 0) break;
    ASSERT_EQ(cut.status, 128 + SIGKILL) << cut.err;
    ++killed;
  }
  if (killed == 0) GTEST_SKIP() << "every run ended before the signal reached it";
  const auto resumed = run("cut", {"--eval-at", "every=2", "--resume"});
  ASSERT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_TRUE(read_file(folder_ / "cut" / "edit.safetensors") == read_file(folder_ / "whole" / "edit.safetensors"));
  EXPECT_EQ(measured("cut"), measured("whole"));
}

// The pack is made of the weights' differences: applied to the unedited model it gives the edited one.
TEST_P(LifelongTest, SavesWhatTheBatchesTogetherHaveDone) {
  ASSERT_EQ(run("whole", {"--save", "pack,model"}).status, 0);
  const auto applied =
      must_run("emend", {"apply", "--model", path("model"), path("whole/edit.safetensors"), "--out", path("applied")});
  EXPECT_TRUE(model_bytes("applied") == model_bytes("whole/model"));
  EXPECT_FALSE(model_bytes("applied") == model_bytes());
}

INSTANTIATE_TEST_SUITE_P(Editors, LifelongTest,
                         ::testing::Values(Sequence{"memit-seq", "mom2_update_weight: 10\n"},
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
};

// Mean −log p of a target after the fact's own prompt.
double surprise(const json& metrics, const char* target) {
  return metrics["counterfact"]["rewrite_prompts_probs"][0][target];
}

TEST_P(SingleProtocolTest, EqualsRunsOfOneFact) {
  const auto together = must_run("memit_edit", run("together", {"--protocol", "single"}));
  const auto judged = cases("together");
  ASSERT_EQ(judged.size(), 3u);
  for (size_t i = 0; i < judged.size(); ++i) {
    const std::string out = "alone" + std::to_string(i);
    must_run("memit_edit", run(out, {"--offset", std::to_string(i), "--limit", "1"}));
    const auto one = cases(out).at(0)["metrics"], same = judged[i]["metrics"];
    for (const char* target : {"target_new", "target_true"}) {
      EXPECT_NEAR(surprise(same["pre"], target), surprise(one["pre"], target), 1e-5);
      EXPECT_NEAR(surprise(same["post"], target), surprise(one["post"], target), 1e-4);
    }
    EXPECT_GT(std::abs(surprise(one["post"], "target_new") - surprise(one["pre"], "target_new")), 0.01)
        << "an edit that does nothing shows nothing";
  }
  const json results = this->results("together");
  EXPECT_EQ(results["protocol"], "single");
  EXPECT_EQ(results["weights_changed"], json::array());
  EXPECT_FALSE(std::filesystem::exists(folder_ / "together" / "edit.safetensors"));
}

// Texts are generated by the state of the model that each fact is judged on.
TEST_P(SingleProtocolTest, GeneratesTextsOfEveryState) {
  auto asked = run("generated", {"--protocol", "single", "--generation"});
  *(std::ranges::find(asked, "--eval") + 1) = "easyedit";
  const auto generated = must_run("memit_edit", asked);
  for (const auto& fact : cases("generated"))
    for (const char* state : {"pre", "post"})
      EXPECT_GT(fact["metrics"][state]["easyedit"]["fluency"].get<double>(), 0) << fact.dump();
  expect_ended(run_program("memit_edit", run("unread", {"--protocol", "single", "--generation"})), 2,
               {"--generation: nothing that reads it"});
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
  const auto whole = must_run("memit_edit", run("whole", {"--protocol", "single"}));
  ProgramOptions options;
  options.signal_when = "edited facts 2-2";
  const auto interrupted = run_program("memit_edit", run("cut", {"--protocol", "single"}), options);
  if (interrupted.status == 0) GTEST_SKIP() << "the run ended before the signal reached it";
  ASSERT_EQ(interrupted.status, 130) << interrupted.err;
  expect_ended(must_run("memit_edit", run("cut", {"--protocol", "single", "--resume"})), 0, {"finished batches"});
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
    expect_ended(run_program("memit_edit", given), 2, {"protocol"});
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
