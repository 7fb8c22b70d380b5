// Means, intervals and the harmonic score.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace emend::evaluation {

/// A mean over records with the half-width of its 95 % interval.
struct Mean {
  double value = 0;
  double deviation =
      0;            ///< standard deviation over the records (divisor n, as numpy's default and the published summary)
  double ci95 = 0;  ///< 1.96 · deviation / √n
  int64_t n = 0;
};

/// Absent if there are no values. Values that are absent are left out.
[[nodiscard]] std::optional<Mean> mean_of(const std::vector<std::optional<double>>& values);
[[nodiscard]] std::optional<Mean> mean_of(const std::vector<double>& values);

/// n / Σ 1/x; 0 if any value is 0 (or below). Absent for no values.
[[nodiscard]] std::optional<double> harmonic_mean(const std::vector<double>& values);

/// 95 % percentile interval of the harmonic mean of column means under resampling of the records. Each record is a row;
/// absent entries are left out of their column. Deterministic for a seed. Absent if a column has no value or
/// `resamples` is 0.
[[nodiscard]] std::optional<std::pair<double, double>> bootstrap_harmonic(
    const std::vector<std::vector<std::optional<double>>>& columns, int resamples, uint64_t seed);

}  // namespace emend::evaluation
