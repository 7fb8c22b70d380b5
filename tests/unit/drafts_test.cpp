// Greedy decoding with drafts writes what it writes without them.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/models/control_vector.h>
#include <emend/models/detail/drafts.h>
#include <emend/models/generation.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "support/debug_models.h"
#include "support/placements.h"

namespace emend::models {
namespace drafts_test {

using Rows = std::vector<std::vector<int64_t>>;
using testing::debug_model;

const Rows kPrompts = {{5, 17, 3, 60, 61, 2, 9}, {88}, {4, 4, 4}, {10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 1, 2, 3}};

// Double, so that no two logits are a rounding apart.
Model exact_model(const std::string& family, const std::string& flavour = "", uint64_t seed = 3) {
  return debug_model(family, seed, flavour, {.dtype = at::kDouble});
}

GenerateOptions tokens(int64_t n) {
  GenerateOptions options{.max_new_tokens = n};
  return options;
}

std::vector<int64_t> random_ids(std::mt19937_64& random, size_t n, int64_t vocabulary) {
  std::vector<int64_t> ids(n);
  for (auto& id : ids) id = static_cast<int64_t>(random() % static_cast<uint64_t>(vocabulary));
  return ids;
}

// A text of these as it is, cut, gone on with, changed in the middle, with a piece left out; or noise; or nothing.
std::vector<int64_t> some_draft(std::mt19937_64& random, const Rows& texts, int64_t vocabulary) {
  std::vector<int64_t> draft = texts[random() % texts.size()];
  const size_t at = draft.empty() ? 0 : random() % draft.size();
  switch (random() % 7) {
    case 0:
      return draft;
    case 1:
      draft.resize(at);
      return draft;
    case 2:
      for (const int64_t id : random_ids(random, 5, vocabulary)) draft.push_back(id);
      return draft;
    case 3:
      if (!draft.empty()) draft[at] = static_cast<int64_t>(random() % static_cast<uint64_t>(vocabulary));
      return draft;
    case 4:
      draft.erase(draft.begin(), draft.begin() + static_cast<std::ptrdiff_t>(at));
      return draft;
    case 5:
      return random_ids(random, random() % 20, vocabulary);
    default:
      return {};
  }
}

std::vector<Drafts> some_drafts(std::mt19937_64& random, const Rows& texts, int64_t vocabulary) {
  std::vector<Drafts> all(texts.size());
  for (auto& drafts : all)
    for (size_t n = random() % 4; n > 0; --n) drafts.push_back(some_draft(random, texts, vocabulary));
  return all;
}

// Learned positions, rotary forms of every kind, windows, ALiBi, experts: all that there is.
TEST(Drafts, ChangeNoTextOfAnyFamily) {
  std::mt19937_64 random(1);
  for (const auto& [family, flavour] : testing::all_flavours()) {
    SCOPED_TRACE(family + " " + flavour);
    const Model model = exact_model(family, flavour);
    const auto options = tokens(24);
    Rows prompts = kPrompts;
    for (auto& prompt : prompts)
      for (auto& id : prompt) id %= model.vocab_size();
    const Rows plain = generate(model, prompts, options);
    for (int round = 0; round < 6; ++round)  // with ids that the model does not know
      EXPECT_EQ(generate(model, prompts, options, some_drafts(random, plain, model.vocab_size() + 2)), plain);
  }
}

// Prompts on both sides of the length from which on frequencies change.
TEST(Drafts, LongTextsOfScaledRotaryForms) {
  std::mt19937_64 random(2);
  int scaled = 0;
  for (const auto& [family, flavour] : testing::all_flavours()) {
    const Model model = exact_model(family, flavour);
    int64_t border = 0;
    for (const auto& rotary : model.config().rotaries)
      if (rotary.depends_on_length()) border = std::max(border, rotary.original_max);
    if (border == 0 || border > 300) continue;
    ++scaled;
    SCOPED_TRACE(family + " " + flavour);
    Rows prompts;
    for (const int64_t away : {-30, -12, -1, 4})
      prompts.push_back(random_ids(random, static_cast<size_t>(std::max<int64_t>(1, border + away)), 90));
    const auto options = tokens(24);
    const Rows plain = generate(model, prompts, options);
    for (int round = 0; round < 4; ++round)
      EXPECT_EQ(generate(model, prompts, options, some_drafts(random, plain, model.vocab_size())), plain);
  }
  EXPECT_GT(scaled, 0);
}

TEST(Drafts, NaturalEndsAndStopIdsStayWhereTheyAre) {
  const Model model = exact_model("llama");
  std::mt19937_64 random(4);
  auto options = tokens(20);
  const Rows free = generate(model, kPrompts, options);
  options.stop_ids = {free[0][4], free[2][1]};
  std::map<int64_t, std::vector<int64_t>> seen;
  options.on_token = [&](int64_t row, int64_t id) { seen[row].push_back(id); };
  std::map<int64_t, int> asked;
  options.ends = [&](int64_t row, int64_t) { return ++asked[row] == 3 + 4 * row; };
  const Rows plain = generate(model, kPrompts, options);
  const auto calls = seen;
  for (int round = 0; round < 20; ++round) {
    seen.clear();
    asked.clear();
    EXPECT_EQ(generate(model, kPrompts, options, some_drafts(random, free, model.vocab_size())), plain);
    EXPECT_EQ(seen, calls);
  }
}

TEST(Drafts, RightOnesSavePasses) {
  const Model model = exact_model("gpt2");
  const auto shared = std::make_shared<const GenerateOptions>(tokens(40));
  Rows texts;
  const auto passes = [&](const std::vector<Drafts>& drafts, size_t rows) {
    int64_t count = 0;
    RunningBatch batch(model, [&](const TokenBatch&, const std::vector<int64_t>&) { ++count; });
    std::vector<BatchRow> added;
    for (size_t r = 0; r < rows; ++r) added.push_back({kPrompts[r], shared, static_cast<int64_t>(r), 0, drafts[r]});
    batch.add(std::move(added));
    while (batch.active() > 0) batch.step();
    return count;
  };
  const Rows plain = generate(model, kPrompts, *shared);
  std::vector<Drafts> right;
  for (const auto& text : plain) right.push_back({text});
  EXPECT_EQ(passes(std::vector<Drafts>(4), 4), 40);
  EXPECT_LE(passes(right, 4), 10);
  EXPECT_LE(passes(right, 1), 8);
}

TEST(Drafts, RowsThatComeAndGo) {
  const Model model = exact_model("mistral");
  const auto shared_tokens = [](int64_t n, Rows& into) {
    auto options = tokens(n);
    options.on_token = [&into](int64_t row, int64_t id) { into[static_cast<size_t>(row)].push_back(id); };
    return std::make_shared<const GenerateOptions>(std::move(options));
  };
  std::mt19937_64 random(5);
  const Rows plain = generate(model, kPrompts, tokens(30));
  for (int round = 0; round < 6; ++round) {
    Rows got(4);
    const auto options = shared_tokens(30, got);
    const auto drafts = some_drafts(random, plain, model.vocab_size());
    RunningBatch batch(model);
    for (size_t r = 0; r < 4; ++r) {
      std::vector<BatchRow> one;
      one.push_back({kPrompts[r], options, static_cast<int64_t>(r), 0, drafts[r]});
      batch.add(std::move(one));
      for (size_t i = 0; i < random() % 4; ++i) batch.step();
    }
    while (batch.active() > 0) batch.step();
    EXPECT_EQ(got, plain);
  }
}

TEST(Drafts, OverSeveralDevices) {
  std::mt19937_64 random(6);
  for (const char* family : {"llama", "gpt2", "mixtral"}) {
    const auto config = testing::placed_config(family);
    const Model whole = testing::placed_model(config, nullptr, at::kDouble);
    const Rows plain = generate(whole, kPrompts, tokens(16));
    const auto plans = testing::cut_plans(testing::placed_shape(whole.config()));
    for (const auto& [name, plan] : plans) {
      SCOPED_TRACE(std::string(family) + " " + name);
      const Model split = testing::placed_model(config, &plan, at::kDouble);
      EXPECT_EQ(generate(split, kPrompts, tokens(16), some_drafts(random, plain, split.vocab_size())), plain);
    }
  }
}

TEST(Drafts, OfSampledAndPenalisedRowsAreNotLookedAt) {
  const Model model = exact_model("llama");
  std::mt19937_64 random(7);
  for (const bool sampled : {true, false}) {
    auto options = tokens(16);
    if (sampled)
      options.temperature = 0.9;
    else
      options.repetition_penalty = 1.5;
    const Rows plain = generate(model, kPrompts, options);
    EXPECT_EQ(generate(model, kPrompts, options, some_drafts(random, plain, model.vocab_size())), plain);
  }
}

// What decays over the answer goes by each token's own place in it.
TEST(Drafts, SteeringThatDecays) {
  const Model model = exact_model("llama");
  at::manual_seed(1);
  const ControlVector vector{"", {{1, at::randn({model.hidden_size()})}}};
  const auto steering = attach_steering(model, vector, {.strength = 2, .decay = 6});
  const Rows plain = generate(model, kPrompts, tokens(16));
  std::mt19937_64 random(8);
  for (int round = 0; round < 6; ++round)
    EXPECT_EQ(generate(model, kPrompts, tokens(16), some_drafts(random, plain, model.vocab_size())), plain);
}

TEST(Drafts, AreOneListAPrompt) {
  const Model model = exact_model("llama");
  EXPECT_THROW((void)generate(model, kPrompts, tokens(4), std::vector<Drafts>(3)), Error);
}

TEST(Drafts, AGuessGoesOnWhereDraftAndTextAgreeLongest) {
  const Rows drafts = {{1, 2, 3, 4, 5}, {1, 2, 9, 9, 7, 8}};
  const auto guessed = [&](const std::vector<int64_t>& written, int64_t most = 9) {
    return detail::guess_next(drafts, written, most).tokens;
  };
  using Ids = std::vector<int64_t>;
  EXPECT_EQ(guessed({}), (Ids{1, 2, 3, 4, 5}));
  EXPECT_EQ(guessed({1, 2}), (Ids{3, 4, 5})) << "the first of the list";
  EXPECT_EQ(guessed({1, 2, 9}), (Ids{9, 7, 8})) << "the other one agrees";
  EXPECT_EQ(guessed({6, 9, 9}), (Ids{7, 8})) << "agrees at its end";
  EXPECT_EQ(guessed({6, 6, 4}), (Ids{5}));
  EXPECT_EQ(guessed({6}), Ids{});
  EXPECT_EQ(guessed({1, 2, 3, 4, 5}), Ids{}) << "the end of a draft says nothing";
  EXPECT_EQ(guessed({1}, 2), (Ids{2, 3}));
  EXPECT_EQ(guessed({1}, 0), Ids{});
  EXPECT_GT(detail::guess_next(drafts, Ids{1, 2}, 2, {60}).chance, detail::guess_next(drafts, Ids{1, 2}, 2).chance);
  EXPECT_GT(detail::guess_next(drafts, Ids{6, 4}, 2).chance, detail::guess_next(drafts, Ids{6, 4}, 2, {4, 3}).chance);
  EXPECT_GT(detail::guess_next(drafts, Ids{6, 9, 9}, 2).chance, detail::guess_next(drafts, Ids{6, 6, 4}, 2).chance);
}

TEST(Drafts, ChecksWhatIsLikelyAndNoMoreThanFits) {
  const std::vector<int64_t> ten(10, 1);
  const auto counts = [](std::vector<detail::Guess> guesses, int64_t limit = 1000) {
    return detail::worth_checking(guesses, static_cast<int64_t>(guesses.size()), limit, true);
  };
  EXPECT_EQ(counts({{ten, 1.0}, {{}, 0.0}}), (std::vector<int64_t>{10, 0}));
  EXPECT_EQ(counts({{ten, 0.0}}), (std::vector<int64_t>{0}));
  EXPECT_EQ(counts({{ten, 1.0}}, 4), (std::vector<int64_t>{3}));
  EXPECT_EQ(counts({{ten, 1.0}}, 0), (std::vector<int64_t>{0}));
  const auto mixed = counts({{ten, 0.95}, {ten, 0.5}});
  EXPECT_GT(mixed[0], mixed[1]);
}

}  // namespace drafts_test
}  // namespace emend::models
