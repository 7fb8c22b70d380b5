// What `emend direct` refuses before its work, of a model that is loaded.
#include <emend/core/error.h>
#include <emend/workflow/changes.h>
#include <emend/workflow/direct/job.h>
#include <emend/workflow/run_directory.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/error_of.h"

namespace emend {
namespace direct_job_test {

using testing::error_of;
using testing::TemporaryFolder;
using workflow::Changes;

class DirectJobTest : public ::testing::Test {
 protected:
  void make(const std::string& family) { use(testing::tiny_model({.family = family})); }
  void use(models::Model model) {
    model_.emplace(std::move(model));
    at::manual_seed(1);
    directions_.method = "mean";
    for (int l = 0; l < model_->n_layers(); ++l) directions_.layers.push_back(at::randn({model_->hidden_size()}));
    directions_.separation.resize(directions_.layers.size());
    workflow::save_directions(folder_ / "direction.safetensors", directions_);
  }
  std::string run(workflow::DirectOptions options) {
    if (options.directions.empty()) options.directions = {folder_.path().string()};
    options.out = (folder_ / ("out" + std::to_string(++made_))).string();
    options.no_effect = options.no_chat = true;
    told_.clear();
    workflow::Handles lent;
    lent.log = Log({workflow::make_sink([this](const LogEvent& event) { told_ += event.text + "\n"; })});
    try {
      (void)workflow::DirectJob(options).run(*model_, lent);
      return "";
    } catch (const Error& error) {
      EXPECT_FALSE(std::filesystem::exists(options.out));
      return error.what();
    }
  }

  const TemporaryFolder folder_{"direct_job"};
  workflow::Directions directions_;
  std::optional<models::Model> model_;
  std::string told_;  // by the last run
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

TEST_F(DirectJobTest, WhatLiesInTheWayIsRefusedAtOnce) {
  make("llama");
  workflow::DirectOptions options{
      .action = "ablate", .out = (folder_ / "s").string(), .directions = {folder_.path().string()}};
  const auto refused = [&] {
    return error_of([&] { const workflow::DirectJob job(options); }, ErrorClass::kInvalidArgument);
  };
  std::filesystem::create_directory(folder_ / "s");
  const std::string begun = "{\"trials\": 2}\n{}\n";
  write_file(folder_ / "s" / "trials.jsonl", begun);
  EXPECT_NE(refused().find("interrupted"), std::string::npos);
  write_file(folder_ / "s" / "trials.jsonl", begun + "{}\n");
  EXPECT_NE(refused().find("ended without a result"), std::string::npos);
  options.force = true;
  for (const char* here : {".", ".."}) {
    options.out = here;
    EXPECT_NE(refused().find("the folder that this program runs in"), std::string::npos) << here;
  }
  workflow::DirectOptions search{.action = "optimise"};
  for (const double strength : {-1.0, 0.0}) {  // an ablation turned round makes more of the direction
    search.change.strength = strength;
    EXPECT_NE(run(search).find("above 0"), std::string::npos);
  }
}

TEST_F(DirectJobTest, WarnsOfADirectionForAnotherKindOfModel) {
  make("llama");
  const std::string file = (folder_ / "v.gguf").string();
  for (const char* kind : {"gpt2", "mistral"}) {
    models::write_control_vector(file, {kind, {{1, at::ones({model_->hidden_size()})}}});
    for (const char* action : {"steer", "ablate"}) {
      EXPECT_EQ(run({.action = action, .directions = {file}}), "");
      EXPECT_EQ(told_.find("v.gguf was made for a model of type \"gpt2\", this one is \"llama\"") != std::string::npos,
                kind == std::string("gpt2"))
          << told_;
    }
  }
}

// No matrix of it is entered by all keys of a layer.
TEST_F(DirectJobTest, WhatAMixtureOfExpertsLacksIsRefusedBeforeItIsLoaded) {
  use(testing::flavour_model({"mixtral", ""}, 5));
  write_file(folder_ / "s.json", R"({"name": "s", "kind": "length"})");
  const auto refused = [&](workflow::DirectOptions options) {
    options.directions = {folder_.path().string()};
    options.out = (folder_ / "none").string();
    if (options.action == "optimise") options.scorers = {(folder_ / "s.json").string()};
    const workflow::DirectJob job(options);
    return error_of([&] { job.check(model_->checkpoint()); }, ErrorClass::kUnsupported);
  };
  EXPECT_NE(refused({.action = "bake"}).find("ablate the direction"), std::string::npos);
  EXPECT_NE(refused({.action = "optimise"}).find("try by ablate"), std::string::npos);
  for (const char* action : {"ablate", "optimise"}) {
    const std::string text = refused({.action = action, .spare = "own", .by = {"ablate"}});
    EXPECT_NE(text.find("leave out spare"), std::string::npos) << text;
    EXPECT_EQ(text.find("try by"), std::string::npos) << text;
  }
  EXPECT_NE(run({.action = "bake"}), "");
  EXPECT_EQ(run({.action = "ablate"}), "");
}

// In the template every text has the token that is to change.
TEST_F(DirectJobTest, PlainTextsAreSparedAsTheyAreWhereAnAnswerBegins) {
  testing::write_tiny_model(folder_ / "chat", 3);
  write_file(folder_ / "chat" / "tokenizer_config.json",
             R"({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template":
                 "{% for m in messages %}{{ m.role + ': ' + m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"})");
  use(models::load_model((folder_ / "chat").string()));
  const auto ask = folder_ / "ask.txt", spare = folder_ / "spare.txt";
  write_file(ask, "What is a tower?\nHello there\n");
  const auto size = [&] {
    workflow::DirectOptions options{.action = "bake", .layers = "1", .texts = ask.string(), .spare = spare.string()};
    options.out = (folder_ / ("chat" + std::to_string(++made_))).string();
    options.directions = {folder_.path().string()};
    options.where = workflow::kAnswerStart;
    options.no_effect = true;
    const auto result = workflow::DirectJob(options).run(*model_, {});
    return result.document["change"][0]["relative_norm"].get<double>();
  };
  const auto expected = [&](bool chat) {
    workflow::DirectChangeOptions how{.layers = {1, 1}, .answer_start = true};
    how.texts = workflow::prompt_rows(*model_, workflow::read_prompts(ask), true);
    how.spared = workflow::prompt_rows(*model_, workflow::read_prompts(spare), chat);
    return workflow::bake_directions(*model_, {&directions_, 1}, how).figures.at(0).relative_norm;
  };
  write_file(spare, "The old town\nSome of them\n");
  EXPECT_NEAR(size() / expected(false), 1, 1e-6);
  EXPECT_GT(std::abs(expected(true) / expected(false) - 1), 0.01) << "the test shows nothing";
  write_file(spare, R"({"prompt": "Hello", "reply": "Well"})");
  EXPECT_NEAR(size() / expected(true), 1, 1e-6);
}

}  // namespace direct_job_test
}  // namespace emend
