#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/models/detail/sampling.h>
#include <emend/models/generation.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "support/debug_models.h"
#include "support/error_of.h"

namespace emend::models {
namespace generation_test {

using Rows = std::vector<std::vector<int64_t>>;

const Rows kPrompts = {{5, 17, 3, 60, 61, 2, 9}, {88}, {4, 4, 4}, {10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 1, 2, 3}};

// Without a cache: the whole text again for every token.
std::vector<int64_t> greedy_by_hand(const Model& model, std::vector<int64_t> text, int64_t n) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> result;
  for (int64_t i = 0; i < n; ++i) {
    const auto logits = model.forward(TokenBatch::from_rows({text})).logits;
    text.push_back(logits[-1].argmax().item<int64_t>());
    result.push_back(text.back());
  }
  return result;
}

TEST(Generation, GreedyEqualsRecomputingEveryStep) {
  for (const char* family : {"llama", "gpt2"}) {
    const Model model = testing::debug_model(family, 3);
    const Rows together = generate(model, kPrompts, {.max_new_tokens = 12});
    for (size_t r = 0; r < kPrompts.size(); ++r)
      EXPECT_EQ(together[r], greedy_by_hand(model, kPrompts[r], 12)) << family << r;
  }
}

TEST(Generation, MoreThanThePositionTableHoldsIsRefusedAtOnce) {
  const Model model = testing::debug_model("gpt2", 3);
  GenerateOptions options;
  for (const int64_t most : {model.max_positions(), std::numeric_limits<int64_t>::max()}) {
    options.max_new_tokens = most;
    EXPECT_THROW((void)generate(model, kPrompts, options), Error) << most;
  }
}

TEST(Generation, ChunkedPrefillChangesNothing) {
  const Model model = testing::debug_model("llama", 4);
  GenerateOptions options{.max_new_tokens = 6};
  const Rows whole = generate(model, kPrompts, options);
  for (const int64_t chunk : {1, 2, 3, 5}) {
    options.prefill_chunk = chunk;
    EXPECT_EQ(generate(model, kPrompts, options), whole) << chunk;
  }
}

TEST(Generation, ABeginningThatAllShareIsReadOnce) {
  const LoadOptions wide{.dtype = at::kDouble};
  Rows prompts;
  for (int64_t r = 0; r < 9; ++r) {
    prompts.emplace_back();
    for (int64_t i = 0; i < 20; ++i) prompts.back().push_back((7 * i + 3) % 50);
    for (int64_t i = 0; i < r % 4; ++i) prompts.back().push_back(60 + r + i);
  }
  for (const auto& [family, flavour] : testing::all_flavours()) {
    SCOPED_TRACE(family + " " + flavour);
    const Model model = testing::debug_model(family, 3, flavour, wide);
    const GenerateOptions options{.max_new_tokens = 8};
    const Rows together = generate(model, prompts, options);
    for (size_t r = 0; r < prompts.size(); ++r) EXPECT_EQ(generate(model, {prompts[r]}, options)[0], together[r]) << r;
  }
  const Model model = testing::debug_model("llama", 3);
  const auto read = [&](bool groups) {
    int64_t tokens = 0;
    RunningBatch batch(model, [&](const TokenBatch& pass, const std::vector<int64_t>& of) {
      EXPECT_EQ(static_cast<int64_t>(of.size()), pass.rows());
      tokens += pass.tokens();
    });
    const auto one = std::make_shared<GenerateOptions>();
    one->max_new_tokens = 1;
    std::vector<BatchRow> rows;
    for (size_t r = 0; r < prompts.size(); ++r)
      rows.push_back({prompts[r], one, static_cast<int64_t>(r), groups ? static_cast<int64_t>(r % 2) : 0});
    batch.add(std::move(rows));
    return tokens;
  };
  int64_t all = 0;
  const std::set<std::vector<int64_t>> different(prompts.begin(), prompts.end());
  for (const auto& prompt : different) all += static_cast<int64_t>(prompt.size());
  EXPECT_EQ(read(true), all) << "rows of different groups are computed differently, equal ones of a group once";
  EXPECT_EQ(read(false), all - (std::ssize(different) - 1) * 19) << "the shortest keeps its last token";
}

GenerateOptions sampling() {
  GenerateOptions options{.max_new_tokens = 10, .temperature = 0.9, .top_k = 20, .seed = 7};
  return options;
}

TEST(Generation, ARowDoesNotDependOnItsCompanions) {
  const Model model = testing::debug_model("llama", 5);
  GenerateOptions options = sampling();
  const Rows together = generate(model, kPrompts, options);
  EXPECT_EQ(generate(model, {kPrompts[0]}, options)[0], together[0]);
  EXPECT_EQ(generate(model, kPrompts, options), together);
  options.seed = 8;
  EXPECT_NE(generate(model, kPrompts, options), together);
}

// Several samples of a prompt: it is read once, and each row goes its own way.
TEST(Generation, EqualPromptsAreReadOnce) {
  const Model model = testing::debug_model("llama", 5);
  const GenerateOptions options = sampling();
  const Rows prompts = {kPrompts[0], kPrompts[1], kPrompts[0], kPrompts[0]};
  const Rows together = generate(model, prompts, options);
  RunningBatch batch(model);
  Rows alone(prompts.size());
  const auto shared = std::make_shared<GenerateOptions>(options);
  shared->on_token = [&](int64_t row, int64_t id) { alone[static_cast<size_t>(row)].push_back(id); };
  for (size_t r = 0; r < prompts.size(); ++r) batch.add({{prompts[r], shared, static_cast<int64_t>(r)}});
  while (batch.active() > 0) batch.step();
  EXPECT_EQ(together, alone);
  EXPECT_NE(together[0], together[2]) << "samples of one prompt";
}

// A row that is done keeps its place for a while, but not beyond the position table.
TEST(Generation, ARowAtTheEndOfTheTableDoesNotStopTheOthers) {
  const Model model = testing::debug_model("gpt2", 3);
  const auto table = static_cast<size_t>(model.max_positions());
  Rows given(6);
  RunningBatch batch(model);
  std::vector<BatchRow> rows;
  for (size_t r = 0; r < given.size(); ++r) {
    auto options = std::make_shared<GenerateOptions>();
    options->on_token = [&](int64_t row, int64_t id) { given[static_cast<size_t>(row)].push_back(id); };
    const size_t prompt = r == 0 ? table - 2 : 2;
    options->max_new_tokens = static_cast<int64_t>(r == 0 ? 2 : table - 2);
    rows.push_back({std::vector<int64_t>(prompt, 3), options, static_cast<int64_t>(r)});
  }
  batch.add(std::move(rows));
  while (batch.active() > 0) batch.step();
  for (size_t r = 0; r < given.size(); ++r) EXPECT_EQ(given[r].size(), r == 0 ? 2 : table - 2);
}

TEST(Generation, StopsAtAStopIdAndLetsTheOthersGoOn) {
  const Model model = testing::debug_model("llama", 3);
  GenerateOptions options{.max_new_tokens = 12};
  const Rows free = generate(model, kPrompts, options);
  options.stop_ids = {free[0][4], free[2][1]};
  std::vector<std::pair<int64_t, int64_t>> seen;
  options.on_token = [&](int64_t row, int64_t id) { seen.emplace_back(row, id); };
  const Rows stopped = generate(model, kPrompts, options);
  size_t total = 0;
  for (size_t r = 0; r < kPrompts.size(); ++r) {
    std::vector<int64_t> expected;
    for (const int64_t id : free[r]) {
      if (std::find(options.stop_ids.begin(), options.stop_ids.end(), id) != options.stop_ids.end()) break;
      expected.push_back(id);
    }
    EXPECT_EQ(stopped[r], expected) << r;
    total += expected.size();
  }
  EXPECT_EQ(seen.size(), total);
}

TEST(Generation, SamplesInProportion) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  GenerateOptions options{.temperature = 1};
  const auto count = [&] {
    std::vector<double> counts(4);
    detail::RowRandom random(1, 0);
    for (int i = 0; i < 20000; ++i) counts[detail::choose_token(logits.data(), 4, options, random)] += 1.0 / 20000;
    return counts;
  };
  auto got = count();
  EXPECT_NEAR(got[0], 0.5, 0.02);
  EXPECT_NEAR(got[3], 0.05, 0.01);
  options.top_k = 2;
  got = count();
  EXPECT_NEAR(got[0], 0.625, 0.02);
  EXPECT_EQ(got[2] + got[3], 0);
  options.top_k = 0;
  options.top_p = 0.75;  // the first two reach it
  got = count();
  EXPECT_NEAR(got[1], 0.375, 0.02);
  EXPECT_EQ(got[2] + got[3], 0);
  options.top_p = 1;
  options.min_p = 0.2;  // at least a fifth of the best: three tokens
  got = count();
  EXPECT_NEAR(got[2], 0.15 / 0.95, 0.02);
  EXPECT_EQ(got[3], 0);
}

// A vocabulary is put in order only as far as a draw goes; written down plainly it is sorted whole.
TEST(Generation, DrawsAsFromAWholeSortedVocabulary) {
  constexpr int64_t kVocabulary = 20003;  // more than 64 times as many as are put in order at first
  std::mt19937 numbers(7);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(kVocabulary);
  for (auto& logit : logits) logit = normal(numbers);
  for (int64_t i = 0; i < 40; ++i) logits[i] = logits[2 * i + 1];  // ties
  std::set<int64_t> seen;
  const auto drawn = [](double temperature, int64_t top_k, double top_p, double min_p) {
    GenerateOptions options{.temperature = temperature, .top_k = top_k, .top_p = top_p, .min_p = min_p};
    return options;
  };
  for (const GenerateOptions& options : {drawn(1, 0, 1, 0), drawn(0.8, 40, 1, 0), drawn(0.4, 0, 0.9, 0),
                                         drawn(3, 700, 1, 0), drawn(2, 500, 0.8, 0.01), drawn(1, 0, 1, 0.05)}) {
    std::vector<int64_t> order(kVocabulary);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
    order.resize(options.top_k > 0 ? options.top_k : kVocabulary);
    std::vector<double> weights;
    for (const int64_t id : order) weights.push_back(std::exp((logits[id] - logits[order[0]]) / options.temperature));
    const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
    double sum = 0;
    size_t kept = 0;
    while (kept < weights.size() && sum < options.top_p * all && weights[kept] >= options.min_p) sum += weights[kept++];
    detail::RowRandom one(3, 5), other(3, 5);
    for (int draw = 0; draw < 2000; ++draw) {
      double left = other.uniform() * sum;
      size_t i = 0;
      while (i + 1 < kept && (left -= weights[i]) >= 0) ++i;
      ASSERT_EQ(detail::choose_token(logits.data(), kVocabulary, options, one), order[i]) << draw;
      seen.insert(order[i]);
    }
  }
  EXPECT_GT(seen.size(), 500u);
}

TEST(Generation, RepetitionPenaltyTouchesEachIdOnce) {
  std::vector<float> logits = {2, -2, 4, 1};
  detail::penalise_repetition(logits.data(), 4, {0, 0, 1, 99}, 2.0);
  EXPECT_EQ(logits, (std::vector<float>{1, -4, 4, 1}));
}

TEST(Generation, ARowWithoutNumbersEndsAlone) {
  Model model = testing::debug_model("llama", 1);
  GenerateOptions options{.max_new_tokens = 4};
  const auto whole = generate(model, {{1, 2}}, options);
  at::Tensor embedding = model.weight("model.embed_tokens.weight").detach().clone();
  embedding[5].fill_(std::nan(""));
  model.set_weight("model.embed_tokens.weight", embedding);
  EXPECT_THROW((void)generate(model, {{1, 2}, {3, 5}}, options), Error);
  std::vector<int64_t> failed;
  options.on_error = [&](int64_t row, const std::exception_ptr&) { failed.push_back(row); };
  const auto texts = generate(model, {{1, 2}, {3, 5}}, options);
  EXPECT_EQ(failed, std::vector<int64_t>{1});
  EXPECT_EQ(texts[0], whole[0]);
  EXPECT_TRUE(texts[1].empty());
}

TEST(Generation, RefusesBadOptionsAndTooLongTexts) {
  const Model model = testing::debug_model("gpt2", 1);
  const auto refused = [&](const GenerateOptions& options, const Rows& prompts) {
    (void)testing::error_of([&] { (void)generate(model, prompts, options); }, ErrorClass::kInvalidArgument);
  };
  GenerateOptions options{.max_new_tokens = 4};
  refused(options, {{}});
  refused(options, {{1, 101}});
  refused(options, {{-1}});
  options.max_new_tokens = 64;
  EXPECT_NO_THROW((void)generate(model, {{1}}, options));
  refused(options, {{1, 2}});
  options.max_new_tokens = 4;
  options.top_p = 0;
  refused(options, {{1}});
  options.top_p = 1;
  options.cancel.request();
  EXPECT_THROW((void)generate(model, {{1}}, options), Error);
}

}  // namespace generation_test
}  // namespace emend::models
