// A run that a program embeds: it edits, judges, saves and reports, and is taken up again where it was interrupted.
#include <emend/core/error.h>
#include <emend/models/placing.h>
#include <emend/workflow/run.h>
#include <emend/workflow/save_formats.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"

namespace emend::workflow {
namespace run_test {

using testing::all_weights;
using testing::changed_weights;

class RunTest : public ::testing::Test {
 protected:
  [[nodiscard]] static std::string fixture(const std::string& name) {
    return std::string(EMEND_SOURCE_DIR) + "/tests/fixtures/tiny_llama" + name;
  }
  [[nodiscard]] RunOptions options(const std::string& out) const {
    return {.hparams = fixture("/memit.yaml"),
            .metrics = {.names = {"counterfact"}},
            .batch_size = 1,
            .corpus = fixture("/corpus.txt"),
            .eval_at = {"each"},
            .out = (folder_.path() / out).string()};
  }
  testing::TemporaryFolder folder_{"run"};
};

TEST_F(RunTest, GoesOnAfterAnInterruption) {
  const auto facts = datasets::load_facts(fixture("/facts.jsonl"));
  auto model = models::load_placed(fixture(""));
  const auto before = all_weights(model);
  {
    workflow::Run whole(model, facts, options("whole"));
    whole.execute();
    EXPECT_EQ(whole.record().failed, 0);
    EXPECT_EQ(whole.record().batches.size(), 2U);
    EXPECT_EQ(whole.record().guard.size(), 2U);
    EXPECT_NE(whole.summary().find("none failed"), std::string::npos) << whole.summary();
    EXPECT_FALSE(changed_weights(model, before).empty()) << "a lent model stays edited";
    whole.session().undo();
  }
  ASSERT_TRUE(changed_weights(model, before).empty());

  auto cut = options("cut");
  {
    const auto first_batch = folder_.path() / "cut" / "checkpoint" / "batch-000000.safetensors";
    const auto go_on = [&](const ProgressUpdate&) { return !std::filesystem::exists(first_batch); };
    workflow::Run run(model, facts, cut, {.progress = stopping(go_on)});
    EXPECT_THROW(run.execute(), Error);
  }
  EXPECT_TRUE(changed_weights(model, before).empty()) << "a run that failed leaves a lent model as it was";
  cut.resume = true;
  workflow::Run resumed(model, facts, cut);
  resumed.execute();
  EXPECT_EQ(resumed.record().guard.size(), 1U) << "one batch was there already";
  EXPECT_EQ(resumed.results()["retention"]["edits_applied"], nlohmann::json({1, 2}));
  EXPECT_EQ(read_file(folder_.path() / "cut" / "edit.safetensors"),
            read_file(folder_.path() / "whole" / "edit.safetensors"));
  EXPECT_EQ(read_file(folder_.path() / "cut" / "cases.jsonl"), read_file(folder_.path() / "whole" / "cases.jsonl"));
  EXPECT_TRUE(std::filesystem::exists(folder_.path() / "cut" / "report.html"));
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "cut" / "checkpoint"));
}

TEST_F(RunTest, SavesInEveryForm) {
  const auto facts = datasets::load_facts(fixture("/facts.jsonl"));
  auto model = models::load_placed(fixture(""));
  auto all = options("all");
  all.save.clear();
  for (const auto& format : save_formats()) all.save.push_back(format.name);
  workflow::Run run(model, facts, all);
  run.execute();
  for (const auto& format : save_formats())
    EXPECT_TRUE(std::filesystem::exists(folder_.path() / "all" / format.file)) << format.name;
  EXPECT_THROW((void)save_format("floppy"), Error);
}

}  // namespace run_test
}  // namespace emend::workflow
