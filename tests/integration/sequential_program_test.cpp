// Many batches on the live model: the editor's memory and the measurements between batches outlive an interruption.
#include <gtest/gtest.h>

#include "support/program_fixture.h"

namespace emend::testing {
namespace {

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
  EXPECT_EQ(two["statistics"]["layers_computed"], json::array()) << "not the statistics of the unedited model";
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

}  // namespace
}  // namespace emend::testing
