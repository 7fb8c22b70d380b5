// Control vectors as files, directions fitted to two sets of prompts, scorers and presets.
#include <ATen/core/grad_mode.h>
#include <emend/workflow/direct/effect.h>
#include <gtest/gtest.h>

#include <random>

#include "support/editor_models.h"
#include "support/gguf_builder.h"

namespace emend {
namespace directions_test {

using testing::NamedTensor;
using testing::TemporaryFolder;
using workflow::ContrastPrompt;

std::string error_of(const std::function<void()>& work, ErrorClass error_class) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.error_class(), error_class) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

models::GgufMetadata metadata(const std::string& architecture = "controlvector") {
  models::GgufMetadata keys;
  keys.set_text("general.architecture", architecture);
  keys.set_text("controlvector.model_hint", "llama");
  keys.set_integer("controlvector.layer_count", 2);
  return keys;
}

TEST(ControlVector, ComesBackAsItWasWithoutBlockZero) {
  const TemporaryFolder folder("control_vector");
  models::ControlVector vector{"llama", {{0, at::ones({4})}, {1, at::arange(4, at::kFloat)}, {7, at::full({4}, -2.5)}}};
  models::write_control_vector(folder / "v.gguf", vector);
  const models::GgufFile file(folder / "v.gguf");
  EXPECT_EQ(file.text("general.architecture"), "controlvector");
  EXPECT_EQ(file.integer("controlvector.layer_count"), 2);
  const auto back = models::read_control_vector(folder / "v.gguf");
  EXPECT_EQ(back.model_hint, "llama");
  ASSERT_EQ(back.layers.size(), 2U);
  EXPECT_TRUE(at::equal(back.layers.at(1), vector.layers.at(1)));
  EXPECT_TRUE(at::equal(back.layers.at(7), vector.layers.at(7)));
  vector.layers = {{0, at::ones({4})}};
  error_of([&] { models::write_control_vector(folder / "w.gguf", vector); }, ErrorClass::kInvalidArgument);
}

TEST(ControlVector, RefusesWhatIsNone) {
  const TemporaryFolder folder("control_vector_refused");
  const at::Tensor row = at::ones({4});
  const auto refused = [&](const models::GgufMetadata& keys, const std::vector<NamedTensor>& tensors) {
    testing::write_gguf_file(folder / "v.gguf", keys, tensors);
    return error_of([&] { (void)models::read_control_vector(folder / "v.gguf"); }, ErrorClass::kCorruption);
  };
  EXPECT_NE(refused(metadata("llama"), {{"direction.1", row}}).find("\"llama\""), std::string::npos);
  EXPECT_NE(refused(metadata(), {{"direction.0", row}}).find("direction.0"), std::string::npos);
  EXPECT_NE(refused(metadata(), {{"direction.200000", row}}).find("at most"), std::string::npos);
  EXPECT_NE(refused(metadata(), {{"direction.one", row}}).find("direction.one"), std::string::npos);
  EXPECT_NE(refused(metadata(), {{"blk.0.ffn_down.weight", row}}).find("blk.0"), std::string::npos);
  EXPECT_NE(refused(metadata(), {{"direction.1", row}, {"direction.2", at::ones({5})}}).find("width 5"),
            std::string::npos);
  EXPECT_NE(refused(metadata(), {{"direction.1", row, models::GgmlType::kF16}}).find("F16"), std::string::npos);
  EXPECT_NE(refused(metadata(), {{"direction.1", row}, {"direction.01", row}}).find("twice"), std::string::npos);
  EXPECT_NE(refused(metadata(), {}).find("no direction"), std::string::npos);
}

models::Model tiny() {
  nlohmann::json config = testing::debug_config("llama");
  config["vocab_size"] = 257;
  return models::load_model(std::make_shared<testing::ByteCheckpoint>(models::random_checkpoint(config, 5), false));
}

TEST(ControlVector, MustFitTheModel) {
  const auto model = tiny();
  const auto steer = [&](int layer, int64_t width, models::LayerRange range = {}) {
    return error_of(
        [&] {
          const models::Steering s(model, {"", {{layer, at::ones({width})}}}, 1, range);
        },
        ErrorClass::kInvalidArgument);
  };
  EXPECT_NE(steer(1, model.hidden_size() + 1).find("width"), std::string::npos);
  EXPECT_NE(steer(model.n_layers(), model.hidden_size()).find("layer " + std::to_string(model.n_layers())),
            std::string::npos);
  EXPECT_NE(steer(1, model.hidden_size(), {0, 0}).find("no direction in the layers"), std::string::npos);
}

// Sentences whose last word tells the sets apart.
std::vector<ContrastPrompt> sentences(const std::string& end, int count = 12) {
  std::vector<ContrastPrompt> prompts;
  for (int i = 0; i < count; ++i) prompts.push_back({.prompt = "item " + std::to_string(i * 37) + " is " + end});
  return prompts;
}

TEST(Directions, TheMeanIsTheDifferenceOfTheLastTokensStates) {
  const at::NoGradGuard no_grad;
  const auto model = tiny();
  const auto high = sentences("good", 3), low = sentences("bad", 2);
  const auto directions = workflow::fit_directions(model, high, low);
  for (int l = 0; l < model.n_layers(); ++l) {
    const auto mean = [&](const std::vector<ContrastPrompt>& prompts) {
      at::Tensor sum = at::zeros({model.hidden_size()});
      for (const auto& prompt : prompts) {
        const auto ids = model.tokenizer().encode_ids(prompt.prompt, true);
        models::ForwardOptions below;
        below.end_layer = l + 1;
        sum += model.forward(models::TokenBatch::from_rows({ids}), below).hidden[-1];
      }
      return sum / static_cast<double>(prompts.size());
    };
    EXPECT_LE((directions.layers[static_cast<size_t>(l)] - (mean(high) - mean(low))).abs().max().item<double>(), 1e-5);
  }
}

TEST(Directions, EveryMethodTellsSetsApartAndChanceIsChance) {
  const auto model = tiny();
  const auto high = sentences("good"), low = sentences("bad");
  std::vector<ContrastPrompt> even, odd;
  std::mt19937 random(5);
  for (int i = 0; i < 120; ++i) (i % 2 ? odd : even).push_back({.prompt = "word " + std::to_string(random() % 100000)});
  for (const char* method : {"mean", "pca", "probe"}) {
    workflow::FitOptions options;
    options.method = method;
    const auto fitted = workflow::fit_directions(model, high, low, options);
    const auto& best = fitted.separation[static_cast<size_t>(fitted.best)];
    EXPECT_GT(best.accuracy, 95) << method;
    EXPECT_GT(best.auc, 95) << method;
    const at::Tensor d = fitted.layers[static_cast<size_t>(fitted.best)];
    EXPECT_GT(d.dot(workflow::fit_directions(model, high, low).layers[static_cast<size_t>(fitted.best)]).item<double>(),
              0)
        << method << " points the other way";
    // Held-out figures: sets that differ by chance are not told apart.
    for (const auto& s : workflow::fit_directions(model, even, odd, options).separation) EXPECT_LT(s.auc, 80) << method;
  }
}

TEST(Directions, ANewOneStaysApartFromOthers) {
  const auto model = tiny();
  workflow::FitOptions options;
  options.apart_from = {workflow::fit_directions(model, sentences("good"), sentences("bad"))};
  const auto other = workflow::fit_directions(model, sentences("new"), sentences("old"), options);
  for (size_t l = 0; l < other.layers.size(); ++l) {
    const at::Tensor a = other.layers[l], b = options.apart_from[0].layers[l];
    EXPECT_LE(std::abs((a.dot(b) / (a.norm() * b.norm())).item<double>()), 1e-5);
  }
}

TEST(Directions, AFileGivesThemBack) {
  const TemporaryFolder folder("directions_file");
  const auto model = tiny();
  const auto fitted = workflow::fit_directions(model, sentences("good"), sentences("bad"));
  workflow::save_directions(folder / "direction.safetensors", fitted);
  const auto back = workflow::load_directions(folder.path());
  EXPECT_EQ(back.to_json(), fitted.to_json());
  for (size_t l = 0; l < fitted.layers.size(); ++l) EXPECT_TRUE(at::equal(back.layers[l], fitted.layers[l]));
  write_safetensors(folder / "other.safetensors", {{"direction.0", at::ones({4})}});
  error_of([&] { (void)workflow::load_directions(folder / "other.safetensors"); }, ErrorClass::kCorruption);
}

TEST(Directions, PromptsAreLinesOrObjects) {
  const TemporaryFolder folder("directions_prompts");
  write_file(folder / "p.txt",
             "Hello there\n\n{\"prompt\": \"Hi\", \"system\": \"Be kind.\", \"reply\": \"Well\"}\r\n");
  const auto prompts = workflow::read_prompts(folder / "p.txt");
  ASSERT_EQ(prompts.size(), 2U);
  EXPECT_EQ(prompts[0].prompt, "Hello there");
  EXPECT_EQ(prompts[1].system + prompts[1].prompt + prompts[1].reply, "Be kind.HiWell");
  write_file(folder / "bad.txt", "one\n{\"text\": \"x\"}\n");
  EXPECT_NE(
      error_of([&] { (void)workflow::read_prompts(folder / "bad.txt"); }, ErrorClass::kCorruption).find("bad.txt:2"),
      std::string::npos);
  const auto model = tiny();
  error_of([&] { (void)workflow::fit_directions(model, prompts, {prompts.data(), 1}); }, ErrorClass::kInvalidArgument);
  error_of([&] { (void)workflow::fit_directions(model, prompts, prompts); }, ErrorClass::kInvalidArgument);
}

TEST(Scorer, CountsWholeWordsAndPhrases) {
  const std::vector<std::string> texts = {"Delve, delve into the rich tapestry!", "No such thing here."};
  EXPECT_NEAR((workflow::Scorer{"s", "rate", {"delve", "rich tapestry", "thin"}}.score(texts)), 100.0 * 3 / 10, 1e-9);
  EXPECT_EQ((workflow::Scorer{"s", "any", {"DELVE"}}.score(texts)), 50);
  EXPECT_EQ((workflow::Scorer{"s", "length", {}}.score(texts)), 5);
  EXPECT_EQ((workflow::Scorer{"s", "rate", {"delve"}}.score({""})), 0);
}

TEST(Scorer, FilesAreChecked) {
  const TemporaryFolder folder("scorer_files");
  const auto refused = [&](const std::string& text) {
    write_file(folder / "s.json", text);
    return error_of([&] { (void)workflow::read_scorer(folder / "s.json"); }, ErrorClass::kCorruption);
  };
  EXPECT_NE(refused(R"({"kind": "length"})").find("name"), std::string::npos);
  EXPECT_NE(refused(R"({"name": "a", "kind": "smell", "words": ["x"]})").find("smell"), std::string::npos);
  EXPECT_NE(refused(R"({"name": "a"})").find("no words"), std::string::npos);
}

TEST(DirectPresets, EachHasTwoSidesAndTestQuestionsOfItsOwn) {
  const auto test = workflow::direct_test_prompts();
  EXPECT_GE(test.size(), 10U);
  for (const auto& name : workflow::direct_preset_names()) {
    const auto preset = workflow::direct_preset(name);
    EXPECT_EQ(preset.positive.size(), preset.negative.size());
    EXPECT_NE(preset.positive[0].system, preset.negative[0].system);
    for (const auto& asked : test)
      for (const auto& fitted : preset.positive) EXPECT_NE(asked.prompt, fitted.prompt) << "kept back, yet fitted on";
  }
  EXPECT_NE(error_of([] { (void)workflow::direct_preset("formalty"); }, ErrorClass::kInvalidArgument).find("formality"),
            std::string::npos);
}

}  // namespace directions_test
}  // namespace emend
