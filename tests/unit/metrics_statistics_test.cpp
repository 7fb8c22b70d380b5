// Means, intervals and the harmonic score against hand-computed values; the partition of rows that begin alike.
#include <emend/evaluation/statistics.h>
#include <emend/models/batch.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

namespace emend::evaluation {
namespace metrics_statistics_test {

TEST(MeanOf, LeavesOutAbsentValues) {
  const auto mean = mean_of(std::vector<std::optional<double>>{1.0, std::nullopt, 0.0, 1.0, 0.0});
  ASSERT_TRUE(mean);
  EXPECT_DOUBLE_EQ(mean->value, 0.5);
  EXPECT_EQ(mean->n, 4);
  EXPECT_DOUBLE_EQ(mean->deviation, 0.5);
  EXPECT_FALSE(mean_of(std::vector<std::optional<double>>{std::nullopt}));
  EXPECT_FALSE(mean_of(std::vector<double>{}));
}

TEST(Interval, OfSharesSaysWhatIsNotKnown) {
  // (p + z²/2n ± z·√(p(1-p)/n + z²/4n²)) / (1 + z²/n), z = 1.959964, worked out apart from this code.
  const auto is = [](const Interval& range, double low, double high) {
    EXPECT_NEAR(range.first, low, 1e-6);
    EXPECT_NEAR(range.second, high, 1e-6);
  };
  is(share_interval(1, 8), 0.6755925, 1);
  is(share_interval(0, 8), 0, 0.3244075);
  is(share_interval(0.5, 10), 0.2365931, 0.7634069);
  is(share_interval(1, 1), 0.2065493, 1);
}

TEST(Interval, OfSharesByTheBinomialDistribution) {
  // Where the tails P(X ≥ hits) and P(X ≤ hits) are 0.025, worked out apart from this code.
  for (const auto& [hits, n, low, high] :
       {std::tuple(4, 5, 0.2835821, 0.9949492), std::tuple(0, 10, 0.0, 0.3084971), std::tuple(5, 5, 0.4781762, 1.0),
        std::tuple(30, 80, 0.2691932, 0.4903548)}) {
    const auto range = exact_share_interval(hits, n);
    EXPECT_NEAR(range.first, low, 1e-6) << hits << " of " << n;
    EXPECT_NEAR(range.second, high, 1e-6) << hits << " of " << n;
  }
}

TEST(Interval, OfMeansIsStudents) {
  // From a table of Student's t: 12.7062, 4.3027, 3.1824, 2.2622 for 1, 2, 3 and 9 degrees of freedom.
  const auto known = [](const std::vector<double>& values, double half) {
    const auto mean = mean_of(values);
    const auto range = mean_interval(*mean);
    ASSERT_TRUE(range);
    EXPECT_NEAR((range->second - range->first) / 2, half, 2e-2 * half);
    EXPECT_NEAR((range->second + range->first) / 2, mean->value, 1e-12);
  };
  known({1, 2}, 6.3531);
  known({1, 2, 3}, 2.4841);
  known({1, 2, 3, 4}, 2.0542);
  known({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 2.1659);
  EXPECT_FALSE(mean_interval(*mean_of(std::vector<double>{3})));
  EXPECT_FALSE(mean_interval(*mean_of(std::vector<double>{3, 3, 3})));
}

TEST(HarmonicMean, MatchesPublishedRows) {
  // MEMIT paper, table 1: 98.9, 88.6, 73.7 give 85.8.
  EXPECT_NEAR(*harmonic_mean({98.9, 88.6, 73.7}), 85.8, 0.1);
  EXPECT_NEAR(*harmonic_mean({15.2, 17.7, 83.5}), 22.4, 0.1);  // from rounded rates
  EXPECT_EQ(*harmonic_mean({50, 0, 80}), 0);
  EXPECT_FALSE(harmonic_mean({}));
}

TEST(Bootstrap, CoversTheEstimateAndIsDeterministic) {
  std::mt19937 random(3);
  std::vector<std::vector<std::optional<double>>> columns(2);
  for (int i = 0; i < 200; ++i) {
    columns[0].push_back(random() % 10 < 8 ? 1.0 : 0.0);
    columns[1].push_back(static_cast<double>(random() % 11) / 10);
  }
  const double estimate = *harmonic_mean({mean_of(columns[0])->value, mean_of(columns[1])->value});
  const auto range = bootstrap_harmonic(columns, 500, 7);
  ASSERT_TRUE(range);
  EXPECT_LT(range->first, estimate);
  EXPECT_GT(range->second, estimate);
  // About 1.96 standard errors to each side: 0.03 for these columns.
  EXPECT_LT(range->second - range->first, 0.15);
  EXPECT_GT(range->second - range->first, 0.04);
  EXPECT_EQ(range, bootstrap_harmonic(columns, 500, 7));
  EXPECT_FALSE(bootstrap_harmonic(columns, 0, 7));
  columns[1].assign(200, std::nullopt);
  EXPECT_FALSE(bootstrap_harmonic(columns, 500, 7));
}

TEST(Bootstrap, DoesNotTakeAllOfFewForCertain) {
  const std::vector<std::vector<std::optional<double>>> columns(3, std::vector<std::optional<double>>(8, 1.0));
  const auto range = bootstrap_harmonic(columns, 1000, 0);
  ASSERT_TRUE(range);
  EXPECT_EQ(range->second, 1);
  EXPECT_GT(range->first, share_interval(1, 8).first) << "three shares, each with an interval of its own";
  EXPECT_LT(range->first, 0.9);
}

TEST(Bootstrap, SharesThatDoNotSpreadSayNothing) {
  using Column = std::vector<std::optional<double>>;
  EXPECT_FALSE(bootstrap_harmonic({Column{1.0}, Column{0.8}}, 500, 0)) << "one case";
  EXPECT_FALSE(bootstrap_harmonic({Column(5, 0.5), Column{1.0, 0.0, 1.0, 1.0, 0.0}}, 500, 0));
}

TEST(Bootstrap, AgreesWithScipy) {
  // scipy 1.17.1: stats.bootstrap((a, b, c), harmonic mean of means, paired=True, n_resamples=200000,
  // method="percentile", random_state=1) gives 0.51208 … 0.61747.
  std::vector<std::vector<std::optional<double>>> columns(3);
  for (int i = 0; i < 60; ++i) {
    columns[0].push_back((i * 7 + 3) % 10 < 8 ? 1.0 : 0.0);
    columns[1].push_back((i * 13 + 5) % 11 / 10.0);
    columns[2].push_back((i * 29 + 1) % 7 / 6.0);
  }
  const auto range = bootstrap_harmonic(columns, 50000, 3);
  ASSERT_TRUE(range);
  EXPECT_NEAR(range->first, 0.51208, 0.002);  // three standard errors of a quantile of 50,000 resamples
  EXPECT_NEAR(range->second, 0.61747, 0.002);
}

using Ids = std::vector<int64_t>;

int64_t saved(const std::vector<models::SharedGroup>& groups) {
  int64_t total = 0;
  for (const auto& group : groups) total += group.shared * static_cast<int64_t>(group.rows.size() - 1);
  return total;
}

TEST(ShareBeginnings, TakesTheBetterOfLongAndManyRows) {
  // Ten rows share two tokens (saves 18); two of them share eight (saves 8).
  std::vector<Ids> rows = {{1, 2, 3, 4, 5, 6, 7, 8}, {1, 2, 3, 4, 5, 6, 7, 8}};
  for (int64_t i = 0; i < 8; ++i) rows.push_back({1, 2, 100 + i});
  auto groups = models::share_beginnings(rows, 1);
  EXPECT_EQ(saved(groups), 18);
  // With four rows the pair is worth more than the start.
  rows.resize(4);
  groups = models::share_beginnings(rows, 1);
  EXPECT_EQ(saved(groups), 8);
  EXPECT_TRUE(models::share_beginnings({}, 1).empty());
}

TEST(ShareBeginnings, CoversEveryRowOnceWithACommonStart) {
  std::mt19937 random(11);
  for (int round = 0; round < 50; ++round) {
    std::vector<Ids> rows(1 + random() % 40);
    for (auto& row : rows) {
      row.resize(random() % 6);
      for (auto& id : row) id = static_cast<int64_t>(random() % 3);
    }
    std::multiset<size_t> seen;
    for (const auto& group : models::share_beginnings(rows, 2)) {
      for (size_t row : group.rows) {
        seen.insert(row);
        ASSERT_LE(group.shared, static_cast<int64_t>(rows[row].size()));
        EXPECT_TRUE(std::equal(rows[row].begin(), rows[row].begin() + group.shared, rows[group.rows[0]].begin()));
      }
    }
    ASSERT_EQ(seen.size(), rows.size());
    EXPECT_EQ(std::set<size_t>(seen.begin(), seen.end()).size(), rows.size());
  }
}

}  // namespace metrics_statistics_test
}  // namespace emend::evaluation
