// What a transaction has done to a weight, as one exact delta.
#pragma once

#include <emend/editors/delta.h>
#include <emend/editors/editor.h>
#include <emend/editors/transaction.h>

namespace emend::editors {

struct WeightChange {
  WeightDelta delta;     ///< dense, float64, host: added to the original it gives the weight's bytes back
  LayerFigures figures;  ///< norms
};

/// Difference between a kept weight as it is now and its original. Throws std::out_of_range if it was not kept.
[[nodiscard]] WeightChange weight_change(const EditTransaction& transaction, const std::string& weight, int layer);

}  // namespace emend::editors
