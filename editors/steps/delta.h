// A change of one weight: two factors, or a dense matrix.
#pragma once

#include <emend/models/model.h>

namespace emend::editors {

/// What to do about a change that is too large to be written.
inline constexpr const char* kTamerChange =
    "lower the learning rate (v_lr, lr) or the clamp, or take more tokens for the statistics";

/// ΔW in paper orientation, W [D,F] acting as m = W k, whatever the checkpoint stores.
///   D output width · F input width · R rank
struct WeightDelta {
  std::string weight;  ///< checkpoint name
  int layer = -1;
  models::Orientation orientation = models::Orientation::kOutIn;  ///< of the stored weight
  at::Tensor left_DR;                                             ///< with right_FR: ΔW = left·rightᵀ
  at::Tensor right_FR;
  at::Tensor dense_DF;  ///< instead of the factors; [D] for a bias

  /// In paper orientation; the site says how the weight is stored.
  [[nodiscard]] static WeightDelta factors(const models::EditSite& site, at::Tensor left_DR, at::Tensor right_FR);
  [[nodiscard]] static WeightDelta dense(const models::EditSite& site, at::Tensor delta_DF);
  /// Of a bias, or of any weight, given as the checkpoint stores it.
  [[nodiscard]] static WeightDelta as_stored(std::string weight, int layer, at::Tensor delta,
                                             models::Orientation orientation = models::Orientation::kOutIn);

  [[nodiscard]] bool low_rank() const noexcept { return left_DR.defined(); }
  /// R, or the smaller side of a dense delta.
  [[nodiscard]] int64_t rank() const;
  [[nodiscard]] std::vector<int64_t> shape() const;  ///< {D,F} or {D}
  /// [D,F] (or [D]) in float64, on the device of the factors.
  [[nodiscard]] at::Tensor matrix() const;
  [[nodiscard]] at::Tensor stored() const;  ///< the same in the orientation of the stored weight
  /// ‖ΔW‖, from the factors' Gram matrices where there are factors.
  [[nodiscard]] double norm() const;
  [[nodiscard]] bool finite() const;  ///< no entry is NaN or infinite
  /// Throws Error(kNumeric) naming the weight if any entry is NaN or infinite.
  void require_finite() const;
};

/// One delta a weight: later ones are added to its first (factors are put side by side; mixed forms become dense).
[[nodiscard]] std::vector<WeightDelta> merge_deltas(const std::vector<WeightDelta>& deltas);

}  // namespace emend::editors
