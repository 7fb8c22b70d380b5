// Control vectors as files, directions fitted to two sets of prompts, and presets.
#include <ATen/core/grad_mode.h>
#include <emend/editors/packs/runtime.h>
#include <emend/evaluation/health.h>
#include <emend/models/generation.h>
#include <emend/workflow/direct/optimise.h>
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "support/editor_models.h"
#include "support/error_of.h"
#include "support/gguf_builder.h"

namespace emend {
namespace directions_test {

using testing::error_of;
using testing::NamedTensor;
using testing::TemporaryFolder;
using workflow::ContrastPrompt;

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

// As repeng and EasySteer write them: a file of the latter may have a direction behind block 0, and says its method.
TEST(ControlVector, OfOtherToolsAreRead) {
  const TemporaryFolder folder("control_vector_others");
  const at::Tensor row = at::arange(4, at::kFloat);
  testing::write_gguf_file(folder / "repeng.gguf", metadata(), {{"direction.2", row}, {"direction.1", 2 * row}});
  const auto repeng = models::read_control_vector(folder / "repeng.gguf");
  EXPECT_TRUE(at::equal(repeng.layers.at(1), 2 * row));
  EXPECT_TRUE(at::equal(repeng.layers.at(2), row));
  auto easy = metadata();
  easy.set_text("controlvector.method", "diffmean");
  easy.set_number("controlvector.n_positive", 8);
  for (const auto& keys : {easy, metadata("steervector")}) {
    testing::write_gguf_file(folder / "easy.gguf", keys, {{"direction.0", row}, {"direction.3", 2 * row}});
    const auto read = models::read_control_vector(folder / "easy.gguf");
    EXPECT_TRUE(at::equal(read.layers.at(0), row));
    EXPECT_TRUE(at::equal(workflow::load_directions(folder / "easy.gguf").layers[3], 2 * row));
    const auto easy = workflow::load_directions(folder / "easy.gguf");
    EXPECT_TRUE(easy.layers[easy.best].defined()) << "a layer that the vector has";
  }
  const auto hint_of = [&](models::GgufMetadata keys, const std::string& hint) {
    keys.set_text("controlvector.model_hint", hint);
    testing::write_gguf_file(folder / "hint.gguf", keys, {{"direction.1", row}});
    return models::read_control_vector(folder / "hint.gguf").model_hint;
  };
  EXPECT_EQ(hint_of(metadata(), "gptneox"), "gptneox");
  for (const char* model : {"Qwen/Qwen2.5-1.5B", "/models/qwen", "unknown", "my-model"})
    EXPECT_EQ(hint_of(easy, model), "") << "a model, which says nothing of its kind";
  const auto of_component = [&](const std::string& about) {
    easy.set_text("controlvector.easysteer", about);
    return hint_of(easy, "gptneox");
  };
  EXPECT_EQ(of_component(R"({"version":1,"component":"hidden_states"})"), "gptneox");
  EXPECT_EQ(of_component(R"({"version":1,"component":null})"), "gptneox");
  EXPECT_NE(error_of([&] { of_component(R"({"component":"attention_heads"})"); }, ErrorClass::kUnsupported)
                .find("attention_heads"),
            std::string::npos);
  error_of([&] { of_component("{"); }, ErrorClass::kCorruption);
}

models::Model tiny() {
  nlohmann::json config = testing::debug_config("llama");
  config["vocab_size"] = 257;
  return models::load_model(testing::byte_checkpoint(models::random_checkpoint(config, 5)));
}

TEST(ControlVector, MustFitTheModel) {
  const auto model = tiny();
  const auto steer = [&](int layer, int64_t width, models::LayerRange range = {}) {
    return error_of(
        [&] {
          const auto s = models::attach_steering(model, {"", {{layer, at::ones({width})}}}, {.layers = range});
        },
        ErrorClass::kInvalidArgument);
  };
  EXPECT_NE(steer(1, model.hidden_size() + 1).find("width"), std::string::npos);
  EXPECT_NE(steer(model.n_layers(), model.hidden_size()).find("layer " + std::to_string(model.n_layers())),
            std::string::npos);
  EXPECT_NE(steer(1, model.hidden_size(), {0, 0}).find("no direction for the layers 0-0; expected some of 1"),
            std::string::npos);
}

// Coordinates of the states behind a layer along a direction, in its lengths.
at::Tensor coordinates(const models::Model& model, const at::Tensor& d, int layer, const std::string& text) {
  models::ForwardOptions below;
  below.end_layer = layer + 1;
  const auto batch = models::TokenBatch::from_rows({model.tokenizer().encode_ids(text, true)});
  return model.forward(batch, below).hidden.mv(d) / d.square().sum();
}

TEST(ControlVector, ClampsTheCoordinateFromItsOrigin) {
  const at::NoGradGuard no_grad;
  const auto model = tiny();
  at::manual_seed(1);
  const at::Tensor d = at::randn({model.hidden_size()});
  const models::ControlVector vector{"", {{1, d}}, {{1, 0.25}}};
  const std::string text = "The tower stands in the town";
  const at::Tensor free = coordinates(model, d, 1, text);
  const double middle = free.median().item<double>();
  const auto steered = [&](const char* by) {
    const auto steering = models::attach_steering(model, vector, {.strength = middle - 0.25, .by = by});
    return coordinates(model, d, 1, text);
  };
  const auto expect = [](const at::Tensor& got, const at::Tensor& wanted) {
    EXPECT_LE((got - wanted).abs().max().item<double>(), 1e-5);
  };
  expect(steered("clamp"), at::full_like(free, middle));
  expect(steered("at-least"), free.clamp_min(middle));
  expect(steered("at-most"), free.clamp_max(middle));
  expect(steered("add"), free + (middle - 0.25));
  EXPECT_NE(error_of([&] { (void)steered("clam"); }, ErrorClass::kInvalidArgument).find("at-least"), std::string::npos);
}

// The prompt gets all of it, each token of the answer less; rows that are continued together have their own place.
TEST(ControlVector, DecaysOverTheAnswer) {
  const at::NoGradGuard no_grad;
  const auto model = tiny();
  at::manual_seed(1);
  const models::ControlVector vector{"", {{1, at::randn({model.hidden_size()})}}};
  const std::vector<std::vector<int64_t>> prompts = {{72, 101, 108}, {65, 100, 97, 1, 2, 3, 4}};
  models::GenerateOptions generate;
  generate.max_new_tokens = 6;
  std::vector<at::Tensor> seen;
  generate.on_logits = [&](int64_t row, int64_t, const at::Tensor& logits) {
    if (row == 1) seen.push_back(logits.clone());
  };
  const auto run = [&](const models::SteerOptions& options) {
    seen.clear();
    const auto steering = models::attach_steering(model, vector, options);
    return models::generate(model, prompts, generate)[1];
  };
  const auto ids = run({.strength = 2, .decay = 4});
  ASSERT_EQ(seen.size(), 6U);
  const auto decayed = seen;
  (void)run({.strength = 2});
  EXPECT_TRUE(at::allclose(seen[0], decayed[0], 1e-5, 1e-5)) << "the prompt gets all of it";
  // By hand: every token of the text with its own share.
  std::vector<int64_t> text = prompts[1];
  text.insert(text.end(), ids.begin(), ids.end() - 1);
  at::Tensor share = at::ones({static_cast<int64_t>(text.size()), 1});
  for (size_t k = 0; k + 1 < ids.size(); ++k)
    share[static_cast<int64_t>(prompts[1].size() + k)] = std::max(0.0, 1 - static_cast<double>(k + 1) / 4);
  const auto hook = model.hooks().at({hooks::Site::kLayerOut, 1}).add([&](const at::Tensor& x) {
    return x + 2 * share * vector.layers.at(1);
  });
  const at::Tensor logits = model.forward(models::TokenBatch::from_rows({text})).logits;
  for (size_t k = 0; k < ids.size(); ++k)
    EXPECT_LE((logits[static_cast<int64_t>(prompts[1].size() - 1 + k)] - decayed[k]).abs().max().item<double>(), 1e-4)
        << k;
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
  options.apart_from[0].layers[1] = at::ones({3});
  error_of([&] { (void)workflow::fit_directions(model, sentences("new"), sentences("old"), options); },
           ErrorClass::kInvalidArgument);
}

TEST(Directions, AMixtureOfOthersTakesNoMoreAway) {
  const auto model = tiny();
  workflow::FitOptions options;
  const auto one = workflow::fit_directions(model, sentences("good"), sentences("bad"));
  options.apart_from = {one};
  const auto wanted = workflow::fit_directions(model, sentences("new"), sentences("old"), options);
  auto again = one, none = one;
  for (auto& layer : again.layers) layer = layer / 3;
  for (auto& layer : none.layers) layer = at::zeros_like(layer);
  options.apart_from = {one, none, again};
  const auto fitted = workflow::fit_directions(model, sentences("new"), sentences("old"), options);
  for (size_t l = 0; l < wanted.layers.size(); ++l)
    EXPECT_LE((fitted.layers[l] - wanted.layers[l]).norm().item<double>(),
              1e-5 * wanted.layers[l].norm().item<double>());
  EXPECT_EQ(workflow::orthonormal_basis({one.layers[0], again.layers[0]}).size(1), 1);
  EXPECT_FALSE(workflow::orthonormal_basis({none.layers[0]}).defined());
  options.apart_from = {wanted, one};
  EXPECT_NE(error_of([&] { (void)workflow::fit_directions(model, sentences("new"), sentences("old"), options); },
                     ErrorClass::kInvalidArgument)
                .find("to stay apart from"),
            std::string::npos);
}

TEST(Directions, SetsOfUnequalSizeMakeNoPairs) {
  const auto model = tiny();
  int warned = 0;
  struct Count : LogSink {
    explicit Count(int& count) : count(count) {}
    void write(const LogEvent& event) override { count += event.name == "direct.pca"; }
    int& count;
  };
  workflow::Handles lent;
  lent.log = Log({std::make_shared<Count>(warned)});
  for (const int more : {0, 1}) {
    workflow::FitOptions options;
    options.method = "pca";
    const auto fitted = workflow::fit_directions(model, sentences("good"), sentences("bad", 12 + more), options, lent);
    EXPECT_EQ(warned, more);
    EXPECT_GT(fitted.separation[static_cast<size_t>(fitted.best)].accuracy, 90);
  }
  // Nor do parts of them: in which order those of one fold are given does not count.
  workflow::FitOptions halves{.method = "pca", .folds = 9};
  auto low = sentences("bad", 3);
  const auto high = sentences("good", 2);
  EXPECT_EQ(workflow::fit_directions(model, high, low, halves).about["folds"], 2) << "as many as were used";
  low = sentences("bad", 5);
  halves.folds = 2;
  const auto exact = testing::tiny_model({.dtype = at::kDouble});
  const auto one = workflow::fit_directions(exact, sentences("good", 4), low, halves);
  std::swap(low[1], low[3]);
  const auto other = workflow::fit_directions(exact, sentences("good", 4), low, halves);
  for (size_t l = 0; l < one.separation.size(); ++l)
    EXPECT_NEAR(other.separation[l].effect, one.separation[l].effect, 1e-5 * std::abs(one.separation[l].effect));
}

TEST(Directions, AFileGivesThemBack) {
  const TemporaryFolder folder("directions_file");
  const auto model = tiny();
  const auto fitted = workflow::fit_directions(model, sentences("good"), sentences("bad"));
  workflow::save_directions(folder / "direction.safetensors", fitted);
  const auto back = workflow::load_directions(folder.path());
  EXPECT_EQ(back.to_json(), fitted.to_json());
  for (size_t l = 0; l < fitted.layers.size(); ++l) EXPECT_TRUE(at::equal(back.layers[l], fitted.layers[l]));
  EXPECT_TRUE(workflow::same_direction(back, fitted));
  EXPECT_EQ(workflow::content_of(back), workflow::content_of(fitted));
  models::write_control_vector(folder / "v.gguf", fitted.control_vector());
  EXPECT_TRUE(workflow::same_direction(workflow::load_directions(folder / "v.gguf"), fitted)) << "but for block 0";
  auto other = fitted;
  other.layers[1] = 2 * other.layers[1];
  EXPECT_FALSE(workflow::same_direction(other, fitted));
  EXPECT_NE(workflow::content_of(other), workflow::content_of(fitted));
  const auto refused = [&](const workflow::Directions& broken) {
    workflow::save_directions(folder / "broken.safetensors", broken);
    error_of([&] { (void)workflow::load_directions(folder / "broken.safetensors"); }, ErrorClass::kCorruption);
  };
  for (const int best : {-3, 77}) {
    other = fitted;
    other.best = best;
    refused(other);
  }
  other = fitted;
  other.about["preset"] = 5;
  refused(other);
  other.about = nullptr;
  refused(other);
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
  for (const char* first : {"Hello", "{\"prompt\": \"Hello\"}"}) {
    write_file(folder / "mark.txt", "\xEF\xBB\xBF" + std::string(first) + "\n");
    EXPECT_EQ(workflow::read_prompts(folder / "mark.txt")[0].prompt, "Hello") << "a byte order mark is no text";
  }
  write_file(folder / "more.txt", "{\"prompt\": \"Hello\", \"id\": 7}\n");
  EXPECT_EQ(workflow::read_prompts(folder / "more.txt")[0].prompt, "Hello");
  write_file(folder / "slip.txt", "{\"prompt\": \"Hello\", \"sytem\": \"Be kind.\"}\n");
  EXPECT_NE(error_of([&] { (void)workflow::read_prompts(folder / "slip.txt"); }, ErrorClass::kCorruption)
                .find("did you mean \"system\""),
            std::string::npos);
  write_file(folder / "bad.txt", "one\n{\"text\": \"x\"}\n");
  EXPECT_NE(
      error_of([&] { (void)workflow::read_prompts(folder / "bad.txt"); }, ErrorClass::kCorruption).find("bad.txt:2"),
      std::string::npos);
  const auto model = tiny();
  error_of([&] { (void)workflow::fit_directions(model, prompts, {prompts.data(), 1}); }, ErrorClass::kInvalidArgument);
  error_of([&] { (void)workflow::fit_directions(model, prompts, prompts); }, ErrorClass::kInvalidArgument);
}

TEST(DirectPresets, EachHasTwoSidesAndTestQuestionsOfItsOwn) {
  EXPECT_TRUE(workflow::direct_preset().scorer.name.empty());
  for (const auto& name : workflow::direct_preset_names()) {
    const auto preset = workflow::direct_preset(name);
    EXPECT_EQ(preset.positive.size(), preset.negative.size()) << name;
    EXPECT_GE(preset.questions.size(), 24U) << name;
    EXPECT_GE(preset.test_prompts.size(), 24U) << name;
    for (size_t i = 0; i < preset.positive.size(); ++i)
      EXPECT_NE(preset.positive[i].system + preset.positive[i].prompt,
                preset.negative[i].system + preset.negative[i].prompt)
          << name;
    for (const auto& asked : preset.test_prompts)
      for (const auto* fitted : {&preset.positive, &preset.negative, &preset.questions})
        for (const auto& other : *fitted) EXPECT_NE(asked.prompt, other.prompt) << name << ": kept back, yet fitted on";
  }
  EXPECT_NE(error_of([] { (void)workflow::direct_preset("formalty"); }, ErrorClass::kInvalidArgument).find("formality"),
            std::string::npos);
}

// What a search leaves out (drafts, layers below the change, answers of a trial that another one beats) changes nothing
// of what it says: each trial is done again here, plainly and in full.
TEST(DirectSearch, SaysWhatPlainTrialsSay) {
  auto model = testing::tiny_model({.seed = 2, .dtype = at::kDouble});
  at::manual_seed(1);
  workflow::Directions directions;
  for (int l = 0; l < model.n_layers(); ++l) directions.layers.push_back(at::randn({model.hidden_size()}));
  workflow::OptimiseOptions options;
  options.prompts = sentences("good", 10);
  options.neutral = sentences("bad", 6);
  options.max_new_tokens = 16;
  options.chat = false;
  options.trials = 24;
  options.max_kl = 0.5;
  const auto asked = prompt_rows(model, options.prompts, false);
  const auto neutral = prompt_rows(model, options.neutral, false);
  const auto texts = [&] {
    std::vector<std::string> all;
    for (const auto& ids : workflow::continued(model, asked, options.max_new_tokens))
      all.push_back(model.tokenizer().decode(ids, true));
    return all;
  };
  const auto before = texts();
  options.scorer = {"letters", "any"};
  for (char letter = 'a'; letter <= 'z' && options.scorer.score({before}) < 60; letter += 2)
    options.scorer.words.emplace_back(1, letter);
  const auto log_probs = workflow::next_log_probs(model, neutral);
  workflow::DirectChangeOptions how;
  how.texts = workflow::answered(model, options.prompts, false, {}, options.max_new_tokens);
  const std::vector<workflow::DirectChange> changes = {workflow::bake_directions(model, {&directions, 1}, how),
                                                       workflow::ablate_directions(model, {&directions, 1}, how)};
  const auto found = workflow::optimise_strengths(model, changes, options);
  EXPECT_EQ(found.score_before, options.scorer.score({before}));
  int scored = 0, unread = 0;
  const workflow::Scorer words{"", "length"}, loops{"", "loops"};
  for (const auto& trial : found.trials) {
    SCOPED_TRACE(trial.to_json().dump());
    const auto at = [&](const auto& weight) { return trial.at(weight); };
    const workflow::TrialChange acting(model, scaled(changes[static_cast<size_t>(trial.change)], at));
    const double kl = evaluation::mean_divergence(log_probs, workflow::next_log_probs(model, neutral));
    const auto answers = texts();
    const double score = options.scorer.score({answers});
    unread += !trial.kl;
    EXPECT_NEAR(trial.kl.value_or(kl), kl, 1e-5 + 1e-5 * kl);
    scored += trial.score.has_value();
    if (trial.score) {
      EXPECT_EQ(*trial.score, score);
      continue;
    }
    bool beaten = score >= found.score_before;
    for (const auto& other : found.trials)
      beaten = beaten || (other.number < trial.number && other.score && *other.kl <= kl && *other.score <= score);
    EXPECT_TRUE(beaten || kl > 4 * options.max_kl || words.score({answers}) < 0.5 * words.score({before}) ||
                loops.score({answers}) > loops.score({before}) + 10)
        << kl << ", " << score;
  }
  EXPECT_GT(scored, 1);
  EXPECT_GT(unread, 1);
}

TEST(Directions, APartIsCheckedWhilePassesRun) {
  const auto model = testing::tiny_model({});
  models::ControlVector vector;
  vector.layers[1] = at::full({model.hidden_size()}, 3.0F);
  const auto part = editors::steer_part(vector, {});
  const auto batch = models::TokenBatch::from_rows({{3, 1, 4, 1, 5}});
  const at::Tensor expected = model.forward(batch).logits;
  std::atomic<bool> done = false;
  int different = 0;
  std::jthread passes([&] {
    const at::NoGradGuard no_grad;
    for (int pass = 0; pass < 3000; ++pass) different += at::equal(model.forward(batch).logits, expected) ? 0 : 1;
    done = true;
  });
  while (!done) (void)editors::make_runtime(part, model, "part");
  passes.join();
  EXPECT_EQ(different, 0);
}

TEST(Directions, WhatIsLeftOfAScaledAblationIsReadOffTheWeights) {
  auto model = testing::tiny_model({.dtype = at::kDouble});
  at::manual_seed(4);
  workflow::Directions directions;
  for (int l = 0; l < model.n_layers(); ++l) directions.layers.push_back(at::randn({model.hidden_size()}));
  const auto change = workflow::ablate_directions(model, {&directions, 1}, {});
  auto half = workflow::scaled(change, [](const auto&) { return 0.5; });
  workflow::measure_left(model, half);
  for (const auto& one : half.figures) {
    const at::Tensor w = model.weight(one.weight).to(at::kDouble);
    const at::Tensor d = directions.layers[static_cast<size_t>(one.layer)].to(at::kDouble);
    const at::Tensor q = d / d.norm(), halved = w - 0.5 * q.outer(q.matmul(w));
    EXPECT_NEAR(one.left, (q.matmul(halved).norm() / halved.norm()).item<double>(), 1e-9) << one.weight;
    EXPECT_GT(one.left, 0.01);
  }
}

TEST(Directions, WhatIsNoNumberDivergesByNoNumber) {
  const at::Tensor right = at::log_softmax(at::ones({2, 5}), -1), broken = right.clone();
  broken[1][3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(evaluation::mean_divergence(right, right), 0);
  EXPECT_TRUE(std::isnan(evaluation::mean_divergence(right, broken)));
}

}  // namespace directions_test
}  // namespace emend
