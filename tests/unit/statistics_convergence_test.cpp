// How much text the statistics need, what two halves of it say, and what is kept on disk on the way.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/editors/steps/solver.h>
#include <emend/editors/steps/statistics.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/editor_models.h"

namespace emend {
namespace statistics_convergence_test {

using editors::compare_halves;
using editors::CorpusStatistics;
using editors::StatisticsOptions;
using editors::StatisticsText;
using testing::relative_difference;
using testing::tiny_model;

// Documents of pseudo-random letters: enough of them to settle a moment of width 48.
StatisticsText text_of(int documents) {
  StatisticsText text;
  text.fingerprint = "letters " + std::to_string(documents);
  text.name = "letters";
  text.each = [documents](const auto& sink) {
    uint64_t state = 12345;
    for (int d = 0; d < documents; ++d) {
      std::string document;
      for (int c = 0; c < 60; ++c) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        document += static_cast<char>(' ' + (state >> 33) % 90);
      }
      if (!sink(document)) return;
    }
  };
  return text;
}

at::Tensor moment_of(const at::Tensor& x_NF) {
  return x_NF.t().mm(x_NF) / static_cast<double>(x_NF.size(0));
}

TEST(Convergence, IndependentSamplesDisagreeAsTheoryHasIt) {
  const int64_t width = 40, half = 5 * width;
  double sum = 0;
  const int draws = 20;
  for (int i = 0; i < draws; ++i) {
    const at::Tensor a = testing::random_matrix(half, width, 2 * i + 1),
                     b = testing::random_matrix(half, width, 2 * i + 2);
    sum += compare_halves(moment_of(a), moment_of(b), 2 * half).disagreement;
  }
  // E tr(A⁻¹B)/F = n/(n − F − 1) for Wishart matrices.
  const double expected = static_cast<double>(half) / static_cast<double>(half - width - 1) - 1;
  EXPECT_NEAR(sum / draws, expected, 0.1 * expected);
}

TEST(Convergence, SeesSmallDirectionsThatTheDistanceOverlooks) {
  const at::Tensor x = testing::random_matrix(400, 20, 1);
  at::Tensor a = moment_of(x), b = a.clone();
  a[0][0] += 1e4;
  b[0][0] += 1e4;
  b[7][7] += 20;  // twenty times what A has there
  const auto report = compare_halves(a, b, 400);
  EXPECT_LT(report.distance, 0.01);
  EXPECT_GT(report.disagreement, 0.5);
  EXPECT_GT(report.condition, 1e3);
  EXPECT_NEAR(compare_halves(b, a, 400).disagreement, report.disagreement, 1e-9) << "neither half is the measure";
  for (const double scale : {0.1, 10.0}) EXPECT_GT(compare_halves(a, scale * a, 400).disagreement, 3);
  const auto same = compare_halves(a, a, 400);
  EXPECT_EQ(same.distance, 0);
  EXPECT_NEAR(same.disagreement, 0, 1e-9);
}

TEST(Convergence, TooFewTokensAreInfinitelyFar) {
  const at::Tensor x = testing::random_matrix(10, 20, 1);
  const auto report = compare_halves(moment_of(x), moment_of(x), 10);
  EXPECT_TRUE(std::isinf(report.disagreement));
  EXPECT_TRUE(report.to_json()["disagreement"].is_null());
}

TEST(AutomaticTokens, StopWhenTheHalvesAgree) {
  const models::Model model = tiny_model();
  StatisticsOptions options;
  options.tokens = editors::kAutoTokens;
  options.convergence = 1.0;
  CorpusStatistics loose(text_of(2000), options);
  loose.prepare(model, {1, 2});
  options.convergence = 0.1;
  CorpusStatistics strict(text_of(2000), options);
  strict.prepare(model, {1, 2});
  EXPECT_LT(loose.get(1).count(), strict.get(1).count());
  EXPECT_GE(loose.get(1).count(), 8 * 48);
  for (const int layer : {1, 2}) {
    const auto& report = strict.get(layer).origin()["convergence"];
    EXPECT_EQ(report["rule"], "halves agree");
    const auto& checks = report["checks"];
    ASSERT_GE(checks.size(), 2U);
    EXPECT_LE(checks.back()["disagreement"].get<double>(), 0.1);
    EXPECT_LT(checks.back()["distance"].get<double>(), checks.front()["distance"].get<double>());
    for (size_t i = 1; i < checks.size(); ++i) EXPECT_GT(checks[i]["tokens"], checks[i - 1]["tokens"]);
  }
  EXPECT_EQ(strict.describe()["convergence"]["layer 2"]["limit"], 0.1);
}

TEST(AutomaticTokens, EndWithTheTextAtTheLatest) {
  const models::Model model = tiny_model();
  StatisticsOptions options;
  options.tokens = editors::kAutoTokens;
  options.convergence = 1e-9;
  CorpusStatistics all(text_of(30), options);
  all.prepare(model, {1});
  EXPECT_EQ(all.get(1).count(), 30 * 60);
}

TEST(FixedTokens, ReportTheHalvesToo) {
  const models::Model model = tiny_model();
  StatisticsOptions options;
  options.tokens = 3000;
  CorpusStatistics fixed(text_of(60), options);
  fixed.prepare(model, {1});
  const auto& report = fixed.get(1).origin()["convergence"];
  EXPECT_EQ(report["rule"], "fixed");
  EXPECT_EQ(report["checks"].size(), 1U);
  EXPECT_GT(report["checks"][0]["disagreement"].get<double>(), 0);
}

// A run that was stopped after it had saved its sums goes on to the moment of an undisturbed one.
TEST(PartialSums, AnInterruptedCollectionGoesOn) {
  const testing::TemporaryFolder folder("partial");
  const models::Model model = tiny_model();
  StatisticsOptions options;
  options.tokens = 120000;  // two chunks
  options.cache = folder.path() / "whole";
  CorpusStatistics whole(text_of(2000), options);
  whole.prepare(model, {1});

  options.cache = folder.path() / "parts";
  options.save_every = std::chrono::seconds(0);
  CancelToken cancel;
  options.cancel = cancel;
  options.progress = [&](const ProgressUpdate& progress) {
    if (progress.done > 90000) cancel.request();
  };
  CorpusStatistics stopped(text_of(2000), options);
  EXPECT_THROW(stopped.prepare(model, {1}), Error);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(options.cache), {}), 1) << "the sums so far";

  int64_t first = 0;
  options.cancel = {};
  options.progress = [&](const ProgressUpdate& progress) {
    if (first == 0) first = static_cast<int64_t>(progress.done);
  };
  CorpusStatistics resumed(text_of(2000), options);
  resumed.prepare(model, {1});
  EXPECT_GT(first, 65536) << "it went on instead of beginning again";
  EXPECT_EQ(resumed.get(1).count(), whole.get(1).count());
  EXPECT_LT(relative_difference(resumed.get(1).cov_FF(), whole.get(1).cov_FF()), 1e-12);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(options.cache), {}), 1) << "the moment alone";
}

TEST(StoredFactors, AreReadInsteadOfMade) {
  const testing::TemporaryFolder folder("factors");
  const auto path = folder.path() / "factor.safetensors";
  const at::Tensor cov_FF = testing::random_spd(24, 3), like = at::zeros({1}, at::kDouble);
  const at::Tensor rhs_FE = testing::random_matrix(24, 2, 4);
  editors::SecondMoment first(cov_FF, 10);
  first.keep_factor_at(path, "key", 1);
  const at::Tensor solved = first.factor(at::kDouble, like).solve(rhs_FE);
  EXPECT_TRUE(std::filesystem::exists(path));

  // Another matrix shows that the file is what is used.
  editors::SecondMoment second(2 * cov_FF, 10);
  second.keep_factor_at(path, "key", 1);
  EXPECT_LT(relative_difference(second.factor(at::kDouble, like).solve(rhs_FE), solved), 1e-12);
  editors::SecondMoment other_key(2 * cov_FF, 10);
  other_key.keep_factor_at(path, "other", 1);
  EXPECT_LT(relative_difference(other_key.factor(at::kDouble, like).solve(rhs_FE), solved / 2), 1e-12);

  editors::SecondMoment narrow(cov_FF, 10);
  narrow.keep_factor_at(folder.path() / "narrow.safetensors", "key");
  (void)narrow.factor(at::kDouble, like);
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "narrow.safetensors")) << "small ones are made faster than read";
}

}  // namespace statistics_convergence_test
}  // namespace emend
