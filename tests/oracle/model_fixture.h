// Compares a model with the numbers that a reference implementation recorded for it.
//
// A fixture folder holds a checkpoint and expected.safetensors: hidden states, attention outputs, keys, logits,
// gradients, logits after a rank-one edit, and greedy generations (docs/formats/fixtures.md).
#pragma once

#include <emend/devices/placement.h>
#include <emend/models/checkpoint.h>

#include <filesystem>
#include <nlohmann/json.hpp>

namespace emend::models {

/// {"family": …, "max_abs_diff": {tensor: largest difference over unmasked positions}, "missing": [tensors it cannot
/// produce], "generation_equal": bool}. Where config.legacy.json exists both configurations are run: the figures are
/// the larger of the two, and "legacy" holds the second run's own. `options` chooses dtype and placement. Throws Error
/// as load_model does; Error(kCorruption) for a damaged expected.safetensors.
[[nodiscard]] nlohmann::json eval_fixture(const std::filesystem::path& folder, const LoadOptions& options = {});

}  // namespace emend::models
