#include <emend/devices/doctor.h>
#include <emend/devices/units.h>
#include <emend/models/family.h>
#include <emend/models/placing.h>

namespace emend::models {

devices::ModelShape model_shape(const ModelConfig& config, at::ScalarType dtype) {
  devices::ModelShape shape;
  shape.n_layers = config.n_layers;
  shape.hidden = config.hidden_size;
  shape.mlp_width = config.mlp_width;
  shape.heads = config.n_heads;
  shape.kv_heads = config.n_kv_heads;
  shape.head_dim = config.head_dim;
  shape.vocab = config.vocab_size;
  shape.positions = config.positions == Positions::kLearned ? config.max_positions : 0;
  shape.gated_mlp = config.mlp != Mlp::kPlain;
  shape.tied = config.tied_head;
  for (const auto& rotary : config.rotaries) shape.rotary_dim = std::max(shape.rotary_dim, rotary.dims);
  shape.parallel = config.residual == Residual::kParallel;
  shape.fused_qkv = config.qkv != Qkv::kSeparate;
  shape.qk_norm = config.qk_norm;
  shape.gate_in_place = config.activation == Activation::kSilu;
  shape.weight_bytes = shape.compute_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  // Exact sizes from the family's table rather than the planner's rule of thumb.
  shape.layer_bytes.assign(config.n_layers, 0);
  for (const auto& tensor : expected_tensors(family_named(config.family), config)) {
    int64_t bytes = shape.weight_bytes;
    for (const int64_t n : tensor.shape) bytes *= n;
    if (tensor.layer >= 0) {
      shape.layer_bytes[tensor.layer] += bytes;
    } else if (tensor.part == Part::kHead || tensor.part == Part::kProjectOut) {
      shape.head_bytes += bytes;
    } else if (tensor.part == Part::kFinalNorm) {
      shape.final_norm_bytes += bytes;
    } else if (tensor.part == Part::kPositions) {
      shape.position_bytes += bytes;
    } else {
      shape.embedding_bytes += bytes;
    }
  }
  return shape;
}

devices::Plan plan_model(const PlaceOptions& options, const ModelConfig& config, const devices::WorkShape& work,
                         const std::string& machine) {
  devices::PlanRequest request;
  request.map = devices::parse_device_map(options.device_map);
  if (!options.max_memory.empty()) request.max_memory = devices::parse_max_memory(options.max_memory);
  request.model = model_shape(config, options.dtype);
  request.work = work;
  request.names = device_module_names(family_named(config.family), config);
  request.machine =
      machine.empty() ? devices::prepare_devices(request.map, request.max_memory) : devices::parse_machine(machine);
  return devices::make_plan(request);
}

// Copies between GPUs are tried before a model relies on them, some milliseconds a pair; wrong ones go through host
// memory from now on.
static void try_copies(const devices::PlacementPlan& plan, const Log& log) {
  auto gpus = plan.devices();
  std::erase_if(gpus, [](c10::Device device) { return !device.is_cuda(); });
  for (const auto& check : devices::check_copies(gpus))
    if (check.status == devices::CheckStatus::kFailed)
      log.warning("placement", check.name + ": " + check.detail + "; " + check.advice);
}

devices::PlacementPlan place_model(const PlaceOptions& options, const ModelConfig& config) {
  const auto plan = plan_model(options, config);
  devices::require_fit(plan);
  try_copies(plan.placement, options.log);
  for (const auto& warning : plan.warnings) options.log.warning("placement", warning);
  // Where memory is limited, what is left decides whether the work fits.
  if (!options.max_memory.empty())
    for (const auto& [device, figures] : plan.devices)
      options.log.info("placement", devices::to_string(device) + ": planned " + devices::format_bytes(figures.total()) +
                                        " of " + devices::format_bytes(figures.limit) + " for the model, " +
                                        devices::format_bytes(figures.limit - figures.total()) + " left for the work");
  return plan.placement;
}

Model load_placed(const std::string& path_or_name, const PlaceOptions& options) {
  return load_placed(open_checkpoint(path_or_name), options);
}

Model load_placed(std::shared_ptr<const Checkpoint> checkpoint, const PlaceOptions& options) {
  LoadOptions load;
  load.dtype = options.dtype;
  load.log = &options.log;
  load.place = [&](const ModelConfig& config, const Checkpoint&) { return place_model(options, config); };
  return load_model(std::move(checkpoint), load);
}

}  // namespace emend::models
