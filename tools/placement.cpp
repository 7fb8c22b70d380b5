#include "placement.h"

#include <emend/devices/units.h>
#include <emend/models/family.h>

namespace emend::tools {

devices::ModelShape model_shape(const models::ModelConfig& config, at::ScalarType dtype) {
  devices::ModelShape shape;
  shape.n_layers = config.n_layers;
  shape.hidden = config.hidden_size;
  shape.mlp_width = config.mlp_width;
  shape.heads = config.n_heads;
  shape.kv_heads = config.n_kv_heads;
  shape.head_dim = config.head_dim;
  shape.vocab = config.vocab_size;
  shape.positions = config.positions == models::Positions::kLearned ? config.max_positions : 0;
  shape.gated_mlp = config.mlp != models::Mlp::kPlain;
  shape.tied = config.tied_head;
  for (const auto& rotary : config.rotaries) shape.rotary_dim = std::max(shape.rotary_dim, rotary.dims);
  shape.parallel = config.residual == models::Residual::kParallel;
  shape.fused_qkv = config.qkv != models::Qkv::kSeparate;
  shape.qk_norm = config.qk_norm;
  shape.gate_in_place = config.activation == models::Activation::kSilu;
  shape.weight_bytes = shape.compute_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  // Exact sizes from the family's table rather than the planner's rule of thumb.
  shape.layer_bytes.assign(config.n_layers, 0);
  for (const auto& tensor : models::expected_tensors(models::family_named(config.family), config)) {
    int64_t bytes = shape.weight_bytes;
    for (const int64_t n : tensor.shape) bytes *= n;
    if (tensor.layer >= 0) {
      shape.layer_bytes[tensor.layer] += bytes;
    } else if (tensor.part == models::Part::kHead || tensor.part == models::Part::kProjectOut) {
      shape.head_bytes += bytes;
    } else if (tensor.part == models::Part::kFinalNorm) {
      shape.final_norm_bytes += bytes;
    } else if (tensor.part == models::Part::kPositions) {
      shape.position_bytes += bytes;
    } else {
      shape.embedding_bytes += bytes;
    }
  }
  return shape;
}

devices::Plan plan_model(const ModelOptions& options, const models::ModelConfig& config, const devices::WorkShape& work,
                         const std::string& machine) {
  devices::PlanRequest request;
  request.map = devices::parse_device_map(options.device_map);
  if (!options.max_memory.empty()) request.max_memory = devices::parse_max_memory(options.max_memory);
  request.model = model_shape(config, parse_dtype(options.dtype, "--dtype"));
  request.work = work;
  request.names = models::device_module_names(models::family_named(config.family), config);
  request.machine =
      machine.empty() ? devices::prepare_devices(request.map, request.max_memory) : devices::parse_machine(machine);
  return devices::make_plan(request);
}

devices::PlacementPlan place_model(const ModelOptions& options, const models::ModelConfig& config, const Log& log) {
  const auto plan = plan_model(options, config, {});
  devices::require_fit(plan);
  for (const auto& warning : plan.warnings) log.warning("placement", warning);
  // Where memory is limited, what is left decides whether the work fits.
  if (!options.max_memory.empty())
    for (const auto& [device, figures] : plan.devices)
      log.info("placement", devices::to_string(device) + ": planned " + devices::format_bytes(figures.total()) +
                                " of " + devices::format_bytes(figures.limit) + " for the model, " +
                                devices::format_bytes(figures.limit - figures.total()) + " left for the work");
  return plan.placement;
}

}  // namespace emend::tools
