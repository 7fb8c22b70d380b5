// From --device-map and --max-memory to where each part of a model goes.
#pragma once

#include <emend/devices/planner.h>
#include <emend/models/checkpoint.h>
#include <emend/models/config.h>

#include "model_options.h"

namespace emend::tools {

/// Sizes of a model as the planner wants them.
[[nodiscard]] devices::ModelShape model_shape(const models::ModelConfig& config, at::ScalarType dtype);

/// The plan for a model and a piece of work. `machine` empty: this machine.
[[nodiscard]] devices::Plan plan_model(const ModelOptions& options, const models::ModelConfig& config,
                                       const devices::WorkShape& work, const std::string& machine = "");

/// Placement for loading; throws Error(kDevice) with the plan's figures and suggestions if the weights do not fit.
[[nodiscard]] devices::PlacementPlan place_model(const ModelOptions& options, const models::ModelConfig& config,
                                                 const Log& log);

}  // namespace emend::tools
