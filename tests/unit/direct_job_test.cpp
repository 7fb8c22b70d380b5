// What `emend direct` refuses before its work, of a model that is loaded.
#include <emend/core/error.h>
#include <emend/workflow/changes.h>
#include <emend/workflow/direct/job.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"

namespace emend {
namespace direct_job_test {

using testing::TemporaryFolder;
using workflow::Changes;

class DirectJobTest : public ::testing::Test {
 protected:
  void make(const std::string& family) {
    model_.emplace(testing::tiny_model({.family = family}));
    at::manual_seed(1);
    directions_.method = "mean";
    for (int l = 0; l < model_->n_layers(); ++l) directions_.layers.push_back(at::randn({model_->hidden_size()}));
    directions_.separation.resize(directions_.layers.size());
    workflow::save_directions(folder_ / "direction.safetensors", directions_);
  }
  std::string run(workflow::DirectOptions options) {
    options.directions = {folder_.path().string()};
    options.out = (folder_ / ("out" + std::to_string(++made_))).string();
    options.no_effect = options.no_chat = true;
    try {
      (void)workflow::DirectJob(options).run(*model_, {});
      return "";
    } catch (const Error& error) {
      EXPECT_FALSE(std::filesystem::exists(options.out));
      return error.what();
    }
  }

  const TemporaryFolder folder_{"direct_job"};
  workflow::Directions directions_;
  std::optional<models::Model> model_;
  int made_ = 0;
};

TEST_F(DirectJobTest, AModelWithAnEditInForceIsRefused) {
  make("llama");
  const auto change = workflow::ablate_directions(*model_, {&directions_, 1}, {.layers = {1, 1}});
  write_file(folder_ / "s.json", R"({"name": "s", "kind": "length"})");
  const std::vector<std::string> scorers = {(folder_ / "s.json").string()};
  const auto held = Changes::order_of(*model_);
  const auto refused = [&] {
    for (const char* action : {"ablate", "bake", "optimise"})
      EXPECT_NE(run({.action = action, .scorers = scorers}).find("a model with an edit in force"), std::string::npos)
          << action;
    EXPECT_EQ(run({.action = "steer"}), "") << "nothing is computed from the weights";
  };
  EXPECT_EQ(run({.action = "ablate"}), "");
  {
    Changes changes(*model_);
    EXPECT_FALSE(Changes::any_in(*model_));
    changes.put_in(change.pack, {}, "pack");
    refused();
    changes.take_out();
    EXPECT_EQ(run({.action = "ablate"}), "");
  }
  EXPECT_FALSE(Changes::any_in(*model_));
  {
    Changes changes(*model_);
    changes.put_in(change.pack, {}, "pack");
  }
  refused();  // it stays when its party ends
}

// GPT-2's outputs have biases, which adapters have no place for.
TEST_F(DirectJobTest, AdaptersOfBiasesAreRefusedBeforeTheWork) {
  make("gpt2");
  for (const char* action : {"ablate", "bake"})
    for (const char* form : {"peft", "lora"}) {
      const std::string text = run({.action = action, .save = {"pack", form}});
      EXPECT_NE(text.find("changes biases"), std::string::npos) << text;
      EXPECT_NE(text.find(form), std::string::npos) << text;
    }
  EXPECT_EQ(run({.action = "bake", .spare = "own", .save = {"peft"}}), "") << "biases stay";
  EXPECT_EQ(run({.action = "ablate", .save = {"pack"}}), "");
  EXPECT_FALSE(workflow::changes_biases(*model_, "ablate", {7, 9})) << "there are none in these layers";
  EXPECT_FALSE(workflow::changes_biases(*model_, "steer", {}));
  const auto llama = testing::tiny_model({});
  for (const char* way : {"ablate", "bake"}) EXPECT_FALSE(workflow::changes_biases(llama, way, {}));
}

// A column is stretched whatever its key.
TEST_F(DirectJobTest, NormsThatAreKeptSpareNoTexts) {
  make("llama");
  workflow::DirectOptions options{.action = "ablate"};
  options.change.preserve_norm = true;
  EXPECT_EQ(run(options), "");
  for (const bool start : {false, true}) {
    auto spared = options;
    (start ? spared.where : spared.spare) = start ? "answer-start" : "own";
    EXPECT_NE(run(spared).find("texts to spare"), std::string::npos);
  }
}

TEST_F(DirectJobTest, ScorersHaveNamesOfTheirOwn) {
  make("llama");
  write_file(folder_ / "a.json", R"({"name": "one", "kind": "any", "words": ["x"]})");
  write_file(folder_ / "b.json", R"({"name": "one", "kind": "length"})");
  write_file(folder_ / "words.json", R"({"name": "words", "kind": "any", "words": ["x"]})");
  const auto file = [&](const char* name) { return (folder_ / name).string(); };
  EXPECT_EQ(run({.action = "ablate", .scorers = {file("a.json")}}), "");
  EXPECT_NE(run({.action = "ablate", .scorers = {file("a.json"), file("b.json")}}).find("a name each"),
            std::string::npos);
  EXPECT_NE(run({.action = "ablate", .scorers = {file("words.json")}}).find("always shown"), std::string::npos);
}

// What a user keeps in the folder stays; what an earlier change wrote does not.
TEST_F(DirectJobTest, AChangeInPlaceOfAnotherLeavesNothingOfIt) {
  make("llama");
  workflow::DirectOptions options{.action = "ablate", .save = {"pack", "lora"}};
  EXPECT_EQ(run(options), "");
  const auto out = folder_ / ("out" + std::to_string(made_));
  ASSERT_TRUE(std::filesystem::exists(out / "lora.gguf"));
  write_file(out / "notes.txt", "mine");
  write_file(out / "direction.safetensors", "the direction");
  --made_;
  options.save = {"pack"};
  options.force = true;
  EXPECT_EQ(run(options), "");
  EXPECT_FALSE(std::filesystem::exists(out / "lora.gguf"));
  EXPECT_TRUE(std::filesystem::exists(out / "edit.safetensors"));
  EXPECT_EQ(read_file(out / "notes.txt"), "mine");
  EXPECT_EQ(read_file(out / "direction.safetensors"), "the direction");
}

}  // namespace direct_job_test
}  // namespace emend
