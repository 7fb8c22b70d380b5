// From a device map and memory limits, as people write them, to a loaded model.
//
//   models::Model model = models::load_placed("models/gpt2-xl", {.device_map = "balanced", .max_memory = "0=10GiB"});
//
// Goals: programs and embedding code place models by the same rules. Non-goal: choosing between devices (devices/).
#pragma once

#include <emend/core/log.h>
#include <emend/devices/planner.h>
#include <emend/models/checkpoint.h>
#include <emend/models/config.h>
#include <emend/models/model.h>

namespace emend::models {

/// Where a model goes and in which dtype it computes.
struct PlaceOptions {
  /// auto, balanced, balanced_low_0, sequential, cpu, cuda:0, sim:K (K simulated devices) or a JSON/YAML file.
  /// auto is the CPU where no GPU is visible.
  std::string device_map = "auto";
  std::string max_memory = {};        ///< limits per device, such as "0=10GiB,cpu=30GiB"; empty: what is free
  at::ScalarType dtype = at::kFloat;  ///< float32, bfloat16 or float64
  Log log = {};                       ///< warnings of the planner and of the loader
};

/// Sizes of a model as the planner wants them, exact to the byte.
[[nodiscard]] devices::ModelShape model_shape(const ModelConfig& config, at::ScalarType dtype);

/// The plan for a model and a piece of work; nothing is loaded. `machine` as devices::parse_machine reads it, of GPUs,
/// which the map and the limits may call cuda:0, 0 or sim:0; empty: this machine. Throws Error(kInvalidArgument,
/// kDevice) as the parsers of device maps and memory limits do.
[[nodiscard]] devices::Plan plan_model(const PlaceOptions& options, const ModelConfig& config,
                                       const devices::WorkShape& work = {}, const std::string& machine = "");

/// Placement for loading. Throws Error(kDevice) with the plan's figures and suggestions if the weights do not fit.
[[nodiscard]] devices::PlacementPlan place_model(const PlaceOptions& options, const ModelConfig& config);

/// Opens, plans and loads a folder, a .gguf file, or ORG/NAME. Throws as open_checkpoint, place_model and load_model.
[[nodiscard]] Model load_placed(const std::string& path_or_name, const PlaceOptions& options = {});
/// The same for a checkpoint that is open already.
[[nodiscard]] Model load_placed(std::shared_ptr<const Checkpoint> checkpoint, const PlaceOptions& options = {});

}  // namespace emend::models
