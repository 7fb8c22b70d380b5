// Figures for the report that a run does not need for itself: what was added to each weight, the machine, memory.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint.h"

namespace emend::tools {

/// How much of each weight's change was left after rounding to its type; of several batches, the least.
[[nodiscard]] std::map<std::string, double> survived_by_weight(const std::vector<FinishedBatch>& batches);

/// One object a rewritten weight, all batches taken together: layer, weight, update_norm, weight_norm (as it is now),
/// relative, spectrum (the leading singular values of what was added), survived (the least of the batches).
[[nodiscard]] nlohmann::json layer_figures(const std::vector<FinishedBatch>& batches, const models::Model& model);

/// {"devices": "cpu: AMD EPYC, 16.0 GiB", "processors": 2, "threads": 2, "system": "Linux …"}
[[nodiscard]] nlohmann::json machine_figures();

/// By device: the weights' bytes and the peak.
[[nodiscard]] nlohmann::json memory_figures(const models::Model& model);

}  // namespace emend::tools
