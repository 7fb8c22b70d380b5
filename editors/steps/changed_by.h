// What a delta makes of a weight, beside the model: for who computes with edited weights and leaves the model alone.
#pragma once

#include <emend/editors/steps/delta.h>

namespace emend::editors {

/// What apply_delta (apply.h) makes of a weight, bit for bit, as a tensor of its own; `weight_DF` is turned as the
/// delta is. Throws Error(kInvalidArgument) if the shape does not fit.
[[nodiscard]] at::Tensor changed_by(const WeightDelta& delta, const at::Tensor& weight_DF);

}  // namespace emend::editors
