#include <emend/evaluation/statistics.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace emend::evaluation {

std::optional<Mean> mean_of(const std::vector<std::optional<double>>& values) {
  Mean mean;
  for (const auto& value : values)
    if (value) {
      mean.value += *value;
      ++mean.n;
    }
  if (mean.n == 0) return std::nullopt;
  mean.value /= static_cast<double>(mean.n);
  double squares = 0;
  for (const auto& value : values)
    if (value) squares += (*value - mean.value) * (*value - mean.value);
  mean.deviation = std::sqrt(squares / static_cast<double>(mean.n));
  return mean;
}

std::optional<Mean> mean_of(const std::vector<double>& values) {
  return mean_of(std::vector<std::optional<double>>(values.begin(), values.end()));
}

Interval share_interval(double share, int64_t n) {
  constexpr double z2 = 1.959964 * 1.959964;
  const auto count = static_cast<double>(n);
  const double middle = (share + z2 / (2 * count)) / (1 + z2 / count);
  const double half = std::sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count * count))) / (1 + z2 / count);
  return {share <= 0 ? 0 : middle - half, share >= 1 ? 1 : middle + half};
}

Interval exact_share_interval(int64_t hits, int64_t n) {
  // P(at least `least` of n), each with probability p.
  const auto at_least = [n](int64_t least, double p) {
    double sum = 0;
    const auto count = static_cast<double>(n);
    for (int64_t k = least; k <= n; ++k) {
      const auto x = static_cast<double>(k);
      sum += std::exp(std::lgamma(count + 1) - std::lgamma(x + 1) - std::lgamma(count - x + 1) + x * std::log(p) +
                      (count - x) * std::log1p(-p));
    }
    return sum;
  };
  const auto lower = [&](int64_t least) {
    if (least == 0) return 0.0;
    double low = 0, high = 1;
    for (int step = 0; step < 50; ++step) {
      const double middle = (low + high) / 2;
      (at_least(least, middle) < 0.025 ? low : high) = middle;
    }
    return high;
  };
  return {lower(hits), 1 - lower(n - hits)};
}

std::optional<Interval> mean_interval(const Mean& mean) {
  constexpr double kRounding = 1e-6;  // of records that were computed in float32
  const auto free = static_cast<double>(mean.n - 1);
  if (mean.n < 2 || mean.deviation <= kRounding * std::fabs(mean.value)) return std::nullopt;
  // The expansion of Student's quantile about the normal one (Abramowitz and Stegun 26.7.5); the first two are exact.
  const double t = mean.n == 2   ? 12.7062
                   : mean.n == 3 ? 4.3027
                                 : 1.959964 + (2.3723 + (2.8225 + 2.5559 / free) / free) / free;
  const double half = t * mean.deviation / std::sqrt(free);
  return Interval{mean.value - half, mean.value + half};
}

std::optional<double> harmonic_mean(const std::vector<double>& values) {
  if (values.empty()) return std::nullopt;
  double inverses = 0;
  for (double value : values) {
    if (value <= 0) return 0.0;
    inverses += 1 / value;
  }
  return static_cast<double>(values.size()) / inverses;
}

std::optional<Interval> bootstrap_harmonic(const std::vector<std::vector<std::optional<double>>>& columns,
                                           int resamples, uint64_t seed) {
  if (resamples <= 0 || columns.empty() || columns[0].empty()) return std::nullopt;
  std::vector<double> means;
  std::vector<int64_t> unanimous;  // records of a column that is all 0 or all 1; 0 for others
  for (const auto& column : columns) {
    const auto mean = mean_of(column);
    if (!mean) return std::nullopt;
    if (mean->value > 0 && mean->value < 1 && !mean_interval(*mean)) return std::nullopt;  // nothing shows its spread
    means.push_back(mean->value);
    unanimous.push_back(mean->value <= 0 || mean->value >= 1 ? mean->n : 0);
  }
  const double estimate = *harmonic_mean(means);
  const size_t n = columns[0].size();
  std::mt19937_64 random(seed);
  std::vector<double> scores;
  std::vector<double> sums(columns.size()), counts(columns.size());
  for (int round = 0; round < resamples; ++round) {
    std::ranges::fill(sums, 0);
    std::ranges::fill(counts, 0);
    for (size_t i = 0; i < n; ++i) {
      // The remainder's bias is below n / 2^64; std::uniform_int_distribution differs between standard libraries.
      const size_t record = random() % n;
      for (size_t c = 0; c < columns.size(); ++c)
        if (const auto& value = columns[c][record]) {
          sums[c] += *value;
          counts[c] += 1;
        }
    }
    std::vector<double> drawn;
    for (size_t c = 0; c < columns.size(); ++c) {
      if (unanimous[c] > 0) {  // the share s after n of n: density (n + 1) sⁿ
        const double share = std::pow(static_cast<double>(random() >> 11) * 0x1p-53, 1.0 / (unanimous[c] + 1));
        drawn.push_back(means[c] > 0 ? share : 1 - share);
      } else if (counts[c] > 0) {
        drawn.push_back(sums[c] / counts[c]);
      }
    }
    if (drawn.size() == columns.size()) scores.push_back(*harmonic_mean(drawn));
  }
  if (scores.empty()) return std::nullopt;
  std::ranges::sort(scores);
  const auto quantile = [&](double q) {
    const double at = q * static_cast<double>(scores.size() - 1);
    const auto below = static_cast<size_t>(at);
    const size_t above = std::min(below + 1, scores.size() - 1);
    return scores[below] + (at - static_cast<double>(below)) * (scores[above] - scores[below]);
  };
  return Interval{std::min(estimate, quantile(0.025)), std::max(estimate, quantile(0.975))};
}

}  // namespace emend::evaluation
