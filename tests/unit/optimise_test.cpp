// What a search for strengths leaves out does not change what it finds.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/health.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/direct/optimise.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "support/editor_models.h"

namespace emend {
namespace optimise_test {

using workflow::Scorer;

struct Found {
  double kl, score;
  int number;
};

// Of all trials that were or could have been scored: those that no other equals in both.
std::vector<int> front_by_hand(const std::vector<Found>& all, double before) {
  std::vector<Found> kept;
  for (const auto& one : all) {
    const auto beats = [&](const Found& other) {
      return other.number != one.number && other.kl <= one.kl && other.score <= one.score &&
             (other.kl < one.kl || other.score < one.score || other.number < one.number);
    };
    if (one.score < before && std::none_of(all.begin(), all.end(), beats)) kept.push_back(one);
  }
  std::sort(kept.begin(), kept.end(), [](const Found& a, const Found& b) { return a.kl < b.kl; });
  std::vector<int> numbers;
  for (const auto& one : kept) numbers.push_back(one.number);
  return numbers;
}

std::vector<std::string> answers(const models::Model& model, const workflow::OptimiseOptions& options) {
  const auto rows = workflow::prompt_rows(model, options.prompts, options.chat);
  std::vector<std::string> texts;
  for (const auto& ids : workflow::continued(model, rows, options.max_new_tokens))
    texts.push_back(model.tokenizer().decode(ids, true));
  return texts;
}

TEST(Optimise, WhatIsNotAnsweredHasNoPlaceOnTheFront) {
  const at::NoGradGuard no_grad;
  auto model = testing::tiny_model({});
  at::manual_seed(3);
  workflow::Directions directions;
  directions.method = "mean";
  for (int l = 0; l < model.n_layers(); ++l) directions.layers.push_back(at::randn({model.hidden_size()}));
  const auto change = workflow::ablate_directions(model, {&directions, 1}, {});
  workflow::OptimiseOptions options;
  for (const char* text : {"The", "A town", "In the", "Old", "Water", "If one", "My own", "Seven of"})
    options.prompts.push_back({text});
  options.neutral = {{"Some"}, {"They say"}, {"No"}};
  options.chat = false;
  options.max_new_tokens = 12;
  options.trials = 30;
  options.most = 3;
  options.max_kl = 2;
  // The first word of every other answer, whatever bytes it is made of.
  const Scorer length{"", "length"}, loops{"", "loops"};
  const auto before = answers(model, options);
  options.scorer = {"words", "any"};
  for (size_t i = 0; i < before.size(); i += 2) {
    const auto letter = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '\'' || (c & 0x80); };
    const auto begin = std::find_if(before[i].begin(), before[i].end(), letter);
    options.scorer.words.emplace_back(begin, std::find_if_not(begin, before[i].end(), letter));
  }
  const auto neutral = workflow::prompt_rows(model, options.neutral, options.chat);
  const at::Tensor neutral_before = workflow::next_log_probs(model, neutral);
  const auto found = workflow::optimise_strengths(model, {&change, 1}, options);
  EXPECT_EQ(found.score_before, options.scorer.score({before}));
  int left_out = 0;
  std::vector<Found> all;
  for (const auto& trial : found.trials) {
    const workflow::TrialChange acting(model, scaled(change, [&](const auto& weight) { return trial.at(weight); }));
    // A trial that is beaten whatever it loses was not asked what that is.
    const double kl =
        trial.kl ? *trial.kl : evaluation::mean_divergence(neutral_before, workflow::next_log_probs(model, neutral));
    if (kl > 4 * options.max_kl) continue;
    const auto texts = answers(model, options);
    const bool valid =
        length.score({texts}) >= 0.5 * length.score({before}) && loops.score({texts}) <= loops.score({before}) + 10;
    const double score = options.scorer.score({texts});
    if (trial.score) {
      EXPECT_EQ(*trial.score, score) << trial.number;
      EXPECT_TRUE(valid) << trial.number;
    }
    left_out += !trial.score && valid;
    if (valid) all.push_back({kl, score, trial.number});
  }
  EXPECT_EQ(found.front, front_by_hand(all, found.score_before));
  EXPECT_GT(left_out, 0) << "nothing was left out: the test shows nothing";
  options.most = -1;
  EXPECT_THROW((void)workflow::optimise_strengths(model, {&change, 1}, options), Error);
}

TEST(Optimise, BoundsOfScorers) {
  const Scorer any{"", "any", {"old town", "moon"}};
  EXPECT_EQ(any.best(false), 0);
  EXPECT_EQ(any.best(true), 100);
  EXPECT_EQ((Scorer{"", "rate", {"x"}}).best(false), 0);
  EXPECT_FALSE((Scorer{"", "rate", {"x"}}).best(true));
  EXPECT_FALSE((Scorer{"", "length"}).best(false));
  EXPECT_TRUE(any.counts("The old town is"));
  EXPECT_TRUE(any.counts("the Moon, "));
  EXPECT_FALSE(any.counts("the old town")) << "may become \"townhouse\"";
  EXPECT_FALSE(any.counts(""));
  // What counts in a beginning counts in the whole.
  std::mt19937_64 random(1);
  const std::vector<std::string> pieces = {"old", "town", "moon", " ", ", ",       "s", "'",
                                           "é",   "’",    "—",    "…", "\xE2\x80", "人"};
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    for (size_t n = random() % 9; n > 0; --n) text += pieces[random() % pieces.size()];
    std::string longer = text;
    for (size_t n = random() % 4; n > 0; --n) longer += pieces[random() % pieces.size()];
    EXPECT_TRUE(!any.counts(text) || any.score({{longer}}) == 100) << text << "|" << longer;
  }
}

TEST(Optimise, DraftsOfFreeTextsChangeNothing) {
  const auto model = testing::tiny_model({});
  std::vector<std::string> prompts;
  for (int i = 0; i < 20; ++i) prompts.push_back("Text " + std::to_string(i * i) + std::string(i % 7, 'o'));
  const auto plain = evaluation::write_on(model, prompts);
  evaluation::FreeTextOptions options;
  for (size_t i = 0; i < prompts.size(); ++i)
    options.drafts.push_back({plain[i].text, plain[(i + 1) % prompts.size()].text, "", "none of these"});
  options.rows = 7;
  const auto drafted = evaluation::write_on(model, prompts, options);
  for (size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(drafted[i].ids, plain[i].ids) << i;
}

}  // namespace optimise_test
}  // namespace emend
