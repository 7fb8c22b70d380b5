#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/devices/cores.h>
#include <emend/devices/doctor.h>
#include <emend/devices/route.h>
#include <emend/devices/units.h>
#include <emend/models/detail/hf_checkpoint.h>
#include <emend/models/detail/model_state.h>
#include <emend/models/placing.h>
#include <emend/models/tied_head.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <set>
#include <span>

namespace emend::models {
namespace {

// The file that a message about a tensor names.
std::string file_of(const Checkpoint& checkpoint, const std::string& tensor = "") {
  const auto* folder = dynamic_cast<const detail::HfCheckpoint*>(&checkpoint);
  return folder ? folder->file_of(tensor) : checkpoint.path().string();
}

// The tensors of a file by the names of the family's table.
struct Resolution {
  std::map<std::string, const TensorInfo*> found;
  std::vector<std::string> head_duplicates;  // names in the file that repeat a tied head
};

class Resolver {
 public:
  Resolver(const Checkpoint& checkpoint, const FamilySpec& family, const ModelConfig& config,
           const std::vector<ExpectedTensor>& expected)
      : checkpoint_(checkpoint), family_(family), config_(config), expected_(expected) {
    for (const ExpectedTensor& tensor : expected) names_.insert(tensor.name);
  }

  Resolution resolve() {
    Resolution resolution;
    std::vector<std::string> unknown;
    for (const TensorInfo& info : checkpoint_.tensors()) {
      const std::string name = table_name(info.name);
      if (!name.empty()) {
        const auto [other, fresh] = resolution.found.emplace(name, &info);
        if (!fresh)
          damaged(info.name, "tensor \"" + info.name + "\" is there twice, also as \"" + other->second->name + "\"",
                  "each tensor once");
      } else if (repeats_embedding(family_, config_, info.name)) {
        resolution.head_duplicates.push_back(info.name);
      } else if (!is_ignored(family_, info.name)) {
        unknown.push_back(info.name);
      }
    }
    check_shapes(resolution);
    if (!unknown.empty()) refuse_unknown(unknown);
    return resolution;
  }

 private:
  [[nodiscard]] std::string table_name(const std::string& name) const {
    for (const std::string& spelling : table_spellings(family_, name))
      if (names_.count(spelling)) return spelling;
    return {};
  }

  void check_shapes(const Resolution& resolution) const {
    std::vector<std::string> missing;
    for (const ExpectedTensor& tensor : expected_) {
      const auto it = resolution.found.find(tensor.name);
      if (it == resolution.found.end()) {
        missing.push_back(tensor.name);
        continue;
      }
      const TensorInfo& info = *it->second;
      if (info.shape != tensor.shape)
        damaged(info.name, "tensor \"" + info.name + "\" has shape " + shape_text(info.shape),
                shape_text(tensor.shape) + " for this config.json");
      if (!at::isFloatingType(info.dtype))
        throw Error(ErrorClass::kUnsupported,
                    {file_of(checkpoint_, info.name), "tensor \"" + info.name + "\" is " + c10::toString(info.dtype),
                     "float32, float16 or bfloat16 weights",
                     "quantised checkpoints are not loadable as they are; "
                     "use the unquantised one or a GGUF file"});
    }
    if (missing.empty()) return;
    const std::string head_name = name_of(family_.tensors, Part::kHead);
    const bool head = missing.size() == 1 && missing.front() == head_name;
    damaged("",
            head ? "no tensor \"" + head_name + "\", and config.json says that the head is not tied to the embedding"
                 : std::to_string(missing.size()) + " tensors are missing: " + some(missing),
            head ? "the head's weight, or tie_word_embeddings true" : "all tensors of family " + family_.name);
  }

  [[noreturn]] void refuse_unknown(const std::vector<std::string>& unknown) const {
    throw Error(ErrorClass::kUnsupported,
                {file_of(checkpoint_, unknown.front()),
                 std::to_string(unknown.size()) + " tensors are not known: " + some(unknown),
                 "only tensors of family " + family_.name,
                 "config.json does not match the weights, or this is a variant that emend does not know"});
  }

  [[noreturn]] void damaged(const std::string& tensor, const std::string& got, const std::string& expected) const {
    throw Error(ErrorClass::kCorruption, {file_of(checkpoint_, tensor), got, expected,
                                          "check that config.json and weights belong together; fetch them again"});
  }

  static std::string some(const std::vector<std::string>& names) {
    return names.size() > 4 ? join(std::span(names).first(4)) + ", …" : join(names);
  }

  const Checkpoint& checkpoint_;
  const FamilySpec& family_;
  const ModelConfig& config_;
  const std::vector<ExpectedTensor>& expected_;
  std::set<std::string> names_;
};

c10::Device device_of(const ExpectedTensor& tensor, const devices::PlacementPlan& plan) {
  if (tensor.layer >= 0) return plan.layers[tensor.layer];
  if (tensor.part == Part::kEmbedding || tensor.part == Part::kProjectIn) return plan.embedding;
  return tensor.part == Part::kPositions ? plan.position : tensor.part == Part::kHead ? plan.head : plan.final_norm;
}

// A sum is not finite if any term is not; one pass over memory that the first forward pass reads anyway.
void refuse_non_finite(const at::Tensor& tensor, const std::string& name, const Checkpoint& checkpoint) {
  const at::Tensor sum = tensor.sum();
  if (at::isfinite(sum).item<bool>() || at::isfinite(tensor).all().item<bool>()) return;
  throw Error(ErrorClass::kCorruption,
              {file_of(checkpoint, name), "tensor \"" + name + "\" holds values that are not finite", "finite weights",
               "the checkpoint is damaged, or a float16 conversion overflowed: fetch it again"});
}

detail::Linear& slot_of(Model::State& state, const ExpectedTensor& tensor) {
  if (tensor.layer < 0) return state.top[tensor.part];
  detail::LayerWeights& layer = state.layers[tensor.layer];
  if (tensor.expert < 0) return layer[tensor.part];
  if (layer.experts.empty()) layer.experts.resize(state.config.n_experts);
  detail::ExpertWeights& expert = layer.experts[tensor.expert];
  return tensor.part == Part::kExpertGate ? expert.gate : tensor.part == Part::kExpertUp ? expert.up : expert.down;
}

void tie_head(Model::State& state, const Resolution& resolution) {
  const at::Tensor embedding = state.top[Part::kEmbedding].weight;
  at::Tensor head = embedding;
  std::string embedding_name;
  for (const auto& [name, weight] : state.weights)
    if (weight.expected.part == Part::kEmbedding) embedding_name = name;
  if (state.plan.head != state.plan.embedding) {
    head = devices::route_to(embedding, state.plan.head, devices::Purpose::kWeight);
    state.weights.at(embedding_name).copy = head;
  }
  state.top[Part::kHead].weight = head;
  state.synonyms.emplace(name_of(state.family->tensors, Part::kHead), embedding_name);
  for (const std::string& duplicate : resolution.head_duplicates) state.synonyms.emplace(duplicate, embedding_name);
}

}  // namespace

void require_tied(const Checkpoint& checkpoint, const FamilySpec& family, const ModelConfig& config) {
  if (!config.tied_head) return;
  const auto [embedding, heads] = tied_names(family, config, mapped(checkpoint.tensors(), &TensorInfo::name));
  if (heads.empty() || embedding.empty()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor expected = checkpoint.read(embedding);
  for (const auto& name : heads)
    if (const at::Tensor head = checkpoint.read(name); !expected.equal(head.to(expected.scalar_type())))
      throw Error(ErrorClass::kCorruption,
                  {file_of(checkpoint, name),
                   "tensor \"" + name + "\" has other values than \"" + embedding +
                       "\", and config.json says that the head is tied to the embedding",
                   "equal ones, or a head of its own", "to use it set tie_word_embeddings to false in config.json"});
}

Model load_model(std::shared_ptr<const Checkpoint> checkpoint, const LoadOptions& options) {
  devices::choose_functions();
  if (options.dtype != at::kFloat && options.dtype != at::kBFloat16 && options.dtype != at::kDouble)
    throw Error(ErrorClass::kUnsupported,
                {"load_model", std::string("dtype ") + c10::toString(options.dtype), "float32 or bfloat16",
                 "float16 checkpoints are computed in float32 or bfloat16"});
  const std::string file = checkpoint->format() == "huggingface" ? (checkpoint->path() / "config.json").string()
                                                                 : checkpoint->path().string();
  const FamilySpec& family = family_of(checkpoint->config(), file, options.family);
  ModelConfig config = parse_config(checkpoint->config(), file, family);
  const auto expected = expected_tensors(family, config);
  const Resolution resolution = Resolver(*checkpoint, family, config, expected).resolve();
  require_tied(*checkpoint, family, config);
  devices::PlacementPlan plan = options.place ? options.place(config, *checkpoint)
                                              : devices::PlacementPlan::single(c10::Device(c10::kCPU), config.n_layers);
  EMEND_CHECK(std::ssize(plan.layers) == config.n_layers, "a placement plan covers every layer");

  auto state = std::make_unique<Model::State>(std::move(config), family, std::move(plan));
  state->dtype = options.dtype;
  const at::NoGradGuard no_grad;
  for (const ExpectedTensor& tensor : expected) {
    const std::string& name = resolution.found.at(tensor.name)->name;
    const at::Tensor value = checkpoint->read(name).to(options.dtype).contiguous();
    refuse_non_finite(value, name, *checkpoint);
    const at::Tensor placed = devices::route_to(value, device_of(tensor, state->plan), devices::Purpose::kWeight);
    detail::Linear& slot = slot_of(*state, tensor);
    (tensor.bias ? slot.bias : slot.weight) = placed;
    state->names.push_back(name);
    state->weights.emplace(name, Model::State::Weight{placed, tensor, {}});
    if (name != tensor.name) state->synonyms.emplace(tensor.name, name);
    if (const auto bare = without_base(*state->family, name); bare != name) state->synonyms.emplace(bare, name);
  }
  if (state->config.tied_head) tie_head(*state, resolution);
  if (options.tokenizer) state->tokenizer = checkpoint->load_tokenizer();
  state->checkpoint = std::move(checkpoint);
  Model model(std::move(state));
  if (options.log)
    options.log->info("model.loaded", "loaded " + model.config().family + " with " +
                                          std::to_string(model.parameter_count()) + " parameters from " +
                                          model.checkpoint().path().string());
  return model;
}

Model load_model(const std::string& path_or_name, const LoadOptions& options) {
  return load_model(open_checkpoint(path_or_name), options);
}

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
    const bool head = tensor.part == Part::kHead || tensor.part == Part::kProjectOut;
    int64_t& bytes = tensor.layer >= 0                 ? shape.layer_bytes[tensor.layer]
                     : head                            ? shape.head_bytes
                     : tensor.part == Part::kFinalNorm ? shape.final_norm_bytes
                     : tensor.part == Part::kPositions ? shape.position_bytes
                                                       : shape.embedding_bytes;
    bytes += shape.weight_bytes * c10::multiply_integers(tensor.shape);
  }
  return shape;
}

// The devices of a machine that is not here are simulated; maps and limits name them as those of one that is.
static void rename_gpus(devices::PlanRequest& request) {
  const auto rename = [](c10::Device& device) {
    if (device.is_cuda()) device = {devices::kSimulated, device.index()};
  };
  for (auto& [module, device] : request.map.modules) rename(device);
  for (auto& [device, bytes] : request.max_memory.limits) rename(device);
}

devices::Plan plan_model(const PlaceOptions& options, const ModelConfig& config, const devices::WorkShape& work,
                         const std::string& machine) {
  devices::PlanRequest request;
  request.imagined = !machine.empty();
  request.map = devices::parse_device_map(options.device_map);
  if (!options.max_memory.empty())
    request.max_memory = request.imagined ? devices::parse_max_memory(options.max_memory)
                                          : devices::parse_max_memory(options.max_memory, request.map.numbered());
  if (request.imagined) rename_gpus(request);
  request.model = model_shape(config, options.dtype);
  request.work = work;
  request.names = device_module_names(family_named(config.family), config);
  request.machine =
      request.imagined ? devices::parse_machine(machine) : devices::prepare_devices(request.map, request.max_memory);
  return devices::make_plan(request);
}

// Copies between GPUs are tried first, some milliseconds a pair; wrong ones go through host memory from now on.
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
  const auto place = [&](const ModelConfig& config, const Checkpoint&) { return place_model(options, config); };
  return load_model(std::move(checkpoint), {.dtype = options.dtype, .place = place, .log = &options.log});
}

}  // namespace emend::models
