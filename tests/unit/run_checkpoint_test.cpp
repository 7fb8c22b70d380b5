// The memory of an editor in a run's checkpoint: what stays the same is written once, and found again.
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/workflow/checkpoint.h>
#include <gtest/gtest.h>

#include <limits>

namespace emend::workflow {
namespace run_checkpoint_test {

namespace fs = std::filesystem;
using State = std::map<std::string, at::Tensor>;

class RunCheckpointTest : public ::testing::Test {
 protected:
  fs::path folder_ = fs::path(::testing::TempDir()) / "emend_run_checkpoint_test";
  void SetUp() override { fs::remove_all(folder_); }
  void TearDown() override { fs::remove_all(folder_); }

  [[nodiscard]] std::vector<std::string> held_by(size_t index) const {
    const SafetensorsFile file(folder_ / ("state-00000" + std::to_string(index) + ".safetensors"));
    std::vector<std::string> names;
    for (const auto& [name, info] : file.tensors()) names.push_back(name);
    return names;
  }
  [[nodiscard]] size_t states() const {
    size_t count = 0;
    for (const auto& entry : fs::directory_iterator(folder_))
      count += entry.path().filename().string().starts_with("state-") ? 1 : 0;
    return count;
  }
};

void expect_equal(const State& found, const State& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, value] : expected) EXPECT_TRUE(at::equal(found.at(name), value)) << name;
}

TEST_F(RunCheckpointTest, WritesOnlyWhatChangedOfTheMemory) {
  State state = {{"text", at::arange(6, at::kFloat)}, {"sum", at::zeros({3})}, {"seen", at::zeros({1})}};
  RunCheckpoint checkpoint(folder_, {{"seed", 0}}, false);
  checkpoint.save(0, {}, {state});
  EXPECT_EQ(held_by(0).size(), 3U);
  state["sum"].add_(1);                 // in place
  state["seen"] = state["seen"] + 0.0;  // another tensor, though equal
  checkpoint.save(1, {}, {state});
  EXPECT_EQ(held_by(1), (std::vector<std::string>{"seen", "sum"}));
  expect_equal(checkpoint.state(2).editor, state);
  state["seen"] = at::ones({2});
  checkpoint.save(2, {}, {state});
  EXPECT_EQ(held_by(2), std::vector<std::string>{"seen"});
  EXPECT_EQ(states(), 3U) << "the text is in the first file, the sum in the second";

  // Another process goes on: it writes all once more, and nothing of before is needed.
  RunCheckpoint resumed(folder_, {{"seed", 0}}, true);
  State read = resumed.state(3).editor;
  expect_equal(read, state);
  resumed.save(3, {}, {read});
  EXPECT_EQ(held_by(3).size(), 3U);
  EXPECT_EQ(states(), 1U);
  expect_equal(resumed.state(4).editor, state);
  resumed.save(4, {}, {});
  EXPECT_EQ(states(), 0U) << "an editor without memory";
  EXPECT_TRUE(resumed.state(5).editor.empty());
}

// Going on without it, or with one of another batch, would give other weights than a run that was not interrupted.
TEST_F(RunCheckpointTest, RefusesAMemoryThatIsMissingOrDamaged) {
  State state = {{"sum", at::zeros({3})}, {"text", at::arange(6, at::kFloat)}};
  RunCheckpoint checkpoint(folder_, {{"seed", 0}}, false);
  checkpoint.save(0, {}, {state});
  state["sum"].add_(1);
  checkpoint.save(1, {}, {state});
  const auto refused = [&](size_t batches, const std::string& file) {
    try {
      (void)checkpoint.state(batches);
      ADD_FAILURE() << "went on without " << file;
    } catch (const Error& error) {
      EXPECT_EQ(error.error_class(), ErrorClass::kCorruption);
      EXPECT_TRUE(std::string(error.what()).starts_with((folder_ / file).string())) << error.what();
      EXPECT_NE(std::string(error.what()).find("start anew"), std::string::npos) << error.what();
    }
  };
  const std::string last = "state-000001.safetensors", first = "state-000000.safetensors";
  for (const auto& file : {last, first}) {
    const std::string bytes = read_file(folder_ / file);
    fs::remove(folder_ / file);
    refused(2, file);
    std::string damaged = bytes;
    damaged.back() ^= 1;
    write_file(folder_ / file, damaged);
    refused(2, file);
    write_file(folder_ / file, bytes);
    expect_equal(checkpoint.state(2).editor, state);
  }
  // Where the last batch is lost, that of the batch before is no longer held, unless its file is needed.
  EXPECT_EQ(checkpoint.state(1).editor.size(), 2U);
  state["text"].add_(1);
  state["sum"].add_(1);
  checkpoint.save(2, {}, {state});
  refused(1, first);
}

TEST_F(RunCheckpointTest, TakesBatchesInTheirOwnPlacesAlone) {
  RunCheckpoint checkpoint(folder_, {{"seed", 0}}, false);
  for (size_t i = 0; i < 3; ++i) checkpoint.save(i, {}, {});
  const auto batch = [&](int i) { return folder_ / ("batch-00000" + std::to_string(i) + ".safetensors"); };
  EXPECT_EQ(RunCheckpoint(folder_, {{"seed", 0}}, true).load({}).size(), 3U);
  fs::copy_file(batch(0), batch(1), fs::copy_options::overwrite_existing);
  EXPECT_EQ(RunCheckpoint(folder_, {{"seed", 0}}, true).load({}).size(), 1U) << "its facts would count twice";
  write_file(folder_ / "settings.json", "{");
  try {
    (void)RunCheckpoint(folder_, {{"seed", 0}}, true);
    ADD_FAILURE() << "settings that cannot be read were believed";
  } catch (const Error& error) {
    EXPECT_EQ(error.error_class(), ErrorClass::kCorruption) << error.what();
  }
}

TEST_F(RunCheckpointTest, TakesBatchesOfItsOwnRunAlone) {
  const fs::path other = folder_.string() + "_other";
  fs::remove_all(other);
  RunCheckpoint checkpoint(folder_, {{"seed", 0}}, false), foreign(other, {{"seed", 1}}, false);
  for (const size_t index : {0, 1}) {
    checkpoint.save(index, {}, {});
    foreign.save(index, {}, {});
  }
  const RunCheckpoint resumed(folder_, {{"seed", 0}}, true);
  EXPECT_EQ(resumed.load({}).size(), 2U);
  fs::copy_file(other / "batch-000001.safetensors", folder_ / "batch-000001.safetensors",
                fs::copy_options::overwrite_existing);
  EXPECT_EQ(resumed.load({}).size(), 1U);
  fs::remove_all(other);
}

// Settings that a later version has beside others are no other settings.
TEST_F(RunCheckpointTest, NamesTheSettingThatIsAnotherOne) {
  RunCheckpoint(folder_, {{"hparams", {{"layers", {1}}, {"kl", 0.5}}}}, false).save(0, {}, {});
  const nlohmann::json newer = {{"hparams", {{"layers", {1}}, {"kl", 0.5}, {"rounds", 2}}}};
  EXPECT_EQ(RunCheckpoint(folder_, newer, true).load({}).size(), 1U);
  try {
    (void)RunCheckpoint(folder_, {{"hparams", {{"layers", {2}}, {"kl", 0.5}}}}, true);
    ADD_FAILURE() << "other layers";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("\"layers\" is [2] now; expected [1]"), std::string::npos) << error.what();
  }
}

TEST_F(RunCheckpointTest, KeepsWhatTheGuardReadAndWhatWasMeasured) {
  RunCheckpoint checkpoint(folder_, {{"seed", 0}}, false);
  const double infinite = std::numeric_limits<double>::infinity();
  checkpoint.save(0, {}, {{}, {{0.5, 0.1, 2, {}}}});
  checkpoint.save(1, {}, {{}, {{0.5, 0.1, 2, {}}, {infinite, 0.1, 2, {"too far"}}}});
  EXPECT_EQ(checkpoint.state(1).readings.size(), 1U);
  const auto readings = checkpoint.state(2).readings;
  ASSERT_EQ(readings.size(), 2U);
  EXPECT_EQ(readings[0].divergence, 0.5);
  EXPECT_EQ(readings[1].divergence, infinite);
  EXPECT_EQ(readings[1].alarms, std::vector<std::string>{"too far"});

  EXPECT_EQ(checkpoint.measured(2, {}).edits(), 0) << "nothing yet";
  Measured measured;
  for (const int64_t edits : {1, 2, 3}) {
    measured.retention.add(edits, {{1, std::nullopt}, {1, 2.0}});
    measured.lifelong.push_back({{"edits", edits}});
  }
  checkpoint.save_measured(measured);
  const Measured two = checkpoint.measured(2, {});
  EXPECT_EQ(two.lifelong.size(), 2U) << "the third batch is made again";
  EXPECT_EQ(two.edits(), 2);
  EXPECT_EQ(two.retention.to_json().at("edits_applied"), nlohmann::json({1, 2}));
  EXPECT_EQ(two.retention.to_json().at("edited_success"), nlohmann::json({nullptr, 100.0}))
      << "none of the first facts has an old answer";
  write_file(folder_ / "measured.json", "{");
  EXPECT_EQ(checkpoint.measured(2, {}).edits(), 0);
}

}  // namespace run_checkpoint_test
}  // namespace emend::workflow
