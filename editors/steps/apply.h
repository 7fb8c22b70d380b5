// The only writer of weights.
#pragma once

#include <emend/editors/editor.h>
#include <emend/editors/steps/delta.h>
#include <emend/editors/steps/transaction.h>

namespace emend::editors {

struct ApplyReport {
  double weight_norm = 0;  ///< ‖W‖ before
  double delta_norm = 0;   ///< ‖ΔW‖
  double survived = 1;  ///< ⟨W_after − W_before, ΔW⟩ / ‖ΔW‖²; 1 for an exact write, 0 if rounding swallowed all
};

/// Adds the delta to its weight, in place, on the weight's device and in its stored orientation: computed in float64
/// and cast once to the weight's dtype. The original is kept in `transaction` first. Throws Error(kInvalidArgument) if
/// the shape does not fit the weight, Error(kNotFound) for an unknown weight, Error(kNumeric) if the delta is not
/// finite: nothing is written then. If only the sum overflows (float16), part of the weight may be written; the
/// transaction has the original.
ApplyReport apply_delta(const WeightDelta& delta, EditTransaction& transaction);

/// What apply_delta makes of a weight, bit for bit, as a tensor of its own: for who computes with edited weights and
/// leaves the model alone. `weight_DF` is turned as the delta is. Throws Error(kInvalidArgument) for another shape.
[[nodiscard]] at::Tensor changed_by(const WeightDelta& delta, const at::Tensor& weight_DF);

/// What a write says of its layer: norms and what survived the rounding.
void note_write(LayerFigures& figures, const ApplyReport& report);
[[nodiscard]] LayerFigures figures_of_write(int layer, const std::string& weight, const ApplyReport& report);

/// apply_delta, with the delta and the figures of its write added to `result`. Returns the figures, whose `solver` and
/// norms of what was solved for are the caller's to fill in.
LayerFigures& add_delta(const WeightDelta& delta, EditTransaction& transaction, EditResult& result);

/// As apply_delta, for a whole new value (training editors, masks): `value` in the stored orientation and shape.
void write_weight(const std::string& weight, const at::Tensor& value, EditTransaction& transaction);

/// What a transaction has done to a weight, as one delta, dense, float64, host: added to the kept original it gives the
/// weight's bytes back. Throws std::out_of_range if it was not kept.
[[nodiscard]] WeightDelta weight_change(const EditTransaction& transaction, const std::string& weight, int layer);
/// weight_change, with the delta and its norms added to `result`. Returns the delta there.
const WeightDelta& add_change(const EditTransaction& transaction, const std::string& weight, int layer,
                              EditResult& result);

}  // namespace emend::editors
