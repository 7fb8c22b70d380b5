// Means, intervals and the harmonic score.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace emend::evaluation {

/// A mean over records.
struct Mean {
  double value = 0;
  double deviation = 0;  ///< over the records (divisor n, as numpy's default and the published summary)
  int64_t n = 0;
};

/// Ends included.
using Interval = std::pair<double, double>;

/// 95 % interval of a share (0 to 1) of n records, after Wilson: at 1 of 1 it is 0.21 … 1. Records that are shares
/// themselves spread less than yes and no, so that it is too wide for them rather than too narrow.
[[nodiscard]] Interval share_interval(double share, int64_t n);
/// 95 % interval of a share of which `hits` of n records are, by the binomial distribution (Clopper and Pearson).
[[nodiscard]] Interval exact_share_interval(int64_t hits, int64_t n);
/// 95 % interval of any other mean, after Student. Absent where the records do not show how they spread: for one of
/// them, or if all are equal up to the rounding of float32.
[[nodiscard]] std::optional<Interval> mean_interval(const Mean& mean);

/// Absent if there are no values. Values that are absent are left out.
[[nodiscard]] std::optional<Mean> mean_of(const std::vector<std::optional<double>>& values);
[[nodiscard]] std::optional<Mean> mean_of(const std::vector<double>& values);

/// n / Σ 1/x; 0 if any value is 0 (or below). Absent for no values.
[[nodiscard]] std::optional<double> harmonic_mean(const std::vector<double>& values);

/// 95 % percentile interval of the harmonic mean of column means under resampling of the records. Each record is a row;
/// absent entries are left out of their column. A column that is all 0 or all 1 is drawn from what is known of such a
/// share: resampling it would say that it is certain. Deterministic for a seed. Absent if a column has no value or
/// `resamples` is 0.
[[nodiscard]] std::optional<Interval> bootstrap_harmonic(const std::vector<std::vector<std::optional<double>>>& columns,
                                                         int resamples, uint64_t seed);

}  // namespace emend::evaluation
