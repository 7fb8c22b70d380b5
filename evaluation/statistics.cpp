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
  mean.ci95 = 1.96 * mean.deviation / std::sqrt(static_cast<double>(mean.n));
  return mean;
}

std::optional<Mean> mean_of(const std::vector<double>& values) {
  return mean_of(std::vector<std::optional<double>>(values.begin(), values.end()));
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

std::optional<std::pair<double, double>> bootstrap_harmonic(
    const std::vector<std::vector<std::optional<double>>>& columns, int resamples, uint64_t seed) {
  if (resamples <= 0 || columns.empty() || columns[0].empty()) return std::nullopt;
  for (const auto& column : columns)
    if (!mean_of(column)) return std::nullopt;
  const size_t n = columns[0].size();
  std::mt19937_64 random(seed);
  std::vector<double> scores;
  std::vector<double> sums(columns.size()), counts(columns.size());
  for (int round = 0; round < resamples; ++round) {
    std::fill(sums.begin(), sums.end(), 0);
    std::fill(counts.begin(), counts.end(), 0);
    for (size_t i = 0; i < n; ++i) {
      // The remainder's bias is below n / 2^64; std::uniform_int_distribution differs between standard libraries.
      const size_t record = random() % n;
      for (size_t c = 0; c < columns.size(); ++c)
        if (const auto& value = columns[c][record]) {
          sums[c] += *value;
          counts[c] += 1;
        }
    }
    std::vector<double> means;
    for (size_t c = 0; c < columns.size(); ++c)
      if (counts[c] > 0) means.push_back(sums[c] / counts[c]);
    if (means.size() == columns.size()) scores.push_back(*harmonic_mean(means));
  }
  if (scores.empty()) return std::nullopt;
  std::sort(scores.begin(), scores.end());
  const auto quantile = [&](double q) {
    const double at = q * static_cast<double>(scores.size() - 1);
    const auto below = static_cast<size_t>(at);
    const size_t above = std::min(below + 1, scores.size() - 1);
    return scores[below] + (at - static_cast<double>(below)) * (scores[above] - scores[below]);
  };
  return std::make_pair(quantile(0.025), quantile(0.975));
}

}  // namespace emend::evaluation
