// How far second moments are settled: the same numbers from two halves of the text, compared.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <nlohmann/json.hpp>

namespace emend::editors {

/// What two halves say about each other.
struct HalvesReport {
  int64_t tokens = 0;   ///< in both
  double distance = 0;  ///< ‖A − B‖/‖(A + B)/2‖, Frobenius: what the large directions say
  /// tr(A⁻¹B)/F − 1: how much more of the other half lies where this half saw little. All directions count alike, as
  /// they do in a solve with C. n independent tokens a dimension in all give about 2/(n − 2): 0.25 for ten. Infinite
  /// while A is singular.
  double disagreement = 0;
  double condition = 0;  ///< of A, estimated from its Cholesky factor; 0 while it is singular

  [[nodiscard]] nlohmann::json to_json() const;  ///< infinite values become null
};

/// a_FF and b_FF: the second moments (means, not sums) of the halves, float64, on the host or on one device.
[[nodiscard]] HalvesReport compare_halves(const at::Tensor& a_FF, const at::Tensor& b_FF, int64_t tokens);

}  // namespace emend::editors
