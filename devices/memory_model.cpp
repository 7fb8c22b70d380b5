#include <emend/core/error.h>
#include <emend/devices/memory_model.h>

#include <algorithm>

namespace emend::devices {
namespace {

constexpr int64_t kDouble = 8;
constexpr int64_t kFloat = 4;

void require_not_negative(const char* field, int64_t value) {
  if (value < 0)
    throw Error(ErrorClass::kInvalidArgument,
                {"plan", std::string(field) + " is " + std::to_string(value), "0 or more", ""});
}

}  // namespace

void ModelShape::derive_bytes() {
  const int64_t attention = hidden * head_dim * (2 * heads + 2 * kv_heads);
  const int64_t mlp = hidden * mlp_width * (gated_mlp ? 3 : 2);
  layer_bytes.assign(static_cast<size_t>(n_layers), (attention + mlp + 2 * hidden) * weight_bytes);
  embedding_bytes = vocab * hidden * weight_bytes;
  position_bytes = positions * hidden * weight_bytes;
  final_norm_bytes = hidden * weight_bytes;
  head_bytes = tied ? 0 : embedding_bytes;
}

int64_t ModelShape::total_bytes() const {
  int64_t sum = embedding_bytes + position_bytes + final_norm_bytes + head_bytes;
  for (const int64_t bytes : layer_bytes) sum += bytes;
  return sum;
}

nlohmann::ordered_json Figures::to_json() const {
  return {{"weights", weights},   {"activations", activations}, {"statistics", statistics},
          {"solve", solve},       {"kv_cache", kv_cache},       {"optimiser", optimiser},
          {"reserved", reserved}, {"total", total()},           {"limit", limit}};
}

Figures& operator+=(Figures& a, const Figures& b) {
  a.weights += b.weights;
  a.activations += b.activations;
  a.statistics += b.statistics;
  a.solve += b.solve;
  a.kv_cache += b.kv_cache;
  a.optimiser += b.optimiser;
  a.reserved += b.reserved;
  return a;
}

MemoryModel::MemoryModel(ModelShape model, WorkShape work) : model_(std::move(model)), work_(std::move(work)) {
  for (const auto& [field, value] :
       std::initializer_list<std::pair<const char*, int64_t>>{{"n_layers", model_.n_layers},
                                                              {"hidden", model_.hidden},
                                                              {"mlp_width", model_.mlp_width},
                                                              {"vocab", model_.vocab},
                                                              {"rows", work_.rows},
                                                              {"tokens", work_.tokens},
                                                              {"suffix_tokens", work_.suffix_tokens},
                                                              {"scored_tokens", work_.scored_tokens},
                                                              {"facts", work_.facts},
                                                              {"cached_tokens", work_.cached_tokens}})
    require_not_negative(field, value);
  if (static_cast<int64_t>(model_.layer_bytes.size()) != model_.n_layers)
    throw Error(ErrorClass::kInvalidArgument, {"plan", std::to_string(model_.layer_bytes.size()) + " layer sizes",
                                               std::to_string(model_.n_layers) + ", one a layer", ""});
  for (const int64_t l : work_.editing_layers)
    if (l < 0 || l >= model_.n_layers)
      throw Error(ErrorClass::kInvalidArgument,
                  {"plan", "editing layer " + std::to_string(l), "0 to " + std::to_string(model_.n_layers - 1), ""});
  if (work_.suffix_tokens == 0) work_.suffix_tokens = work_.tokens;
  if (work_.scored_tokens == 0) work_.scored_tokens = work_.suffix_tokens;
}

bool MemoryModel::is_editing_layer(int64_t l) const {
  return std::find(work_.editing_layers.begin(), work_.editing_layers.end(), l) != work_.editing_layers.end();
}

Figures MemoryModel::of_layer(int64_t l) const {
  const auto& m = model_;
  Figures figures;
  figures.weights = m.layer_bytes[static_cast<size_t>(l)];
  figures.kv_cache = 2 * work_.cached_tokens * m.kv_heads * m.head_dim * m.compute_bytes;
  if (work_.gradients && l >= work_.first_gradient_layer) {
    // Kept for the backward pass: inputs and outputs of two norms (4D), q, k, v and the attention's output,
    // and the MLP's intermediates (gate, its activation, up, their product; or up and its activation).
    const int64_t per_token =
        4 * m.hidden + (2 * m.heads + 2 * m.kv_heads) * m.head_dim + m.mlp_width * (m.gated_mlp ? 4 : 2);
    figures.activations = work_.rows * work_.suffix_tokens * per_token * m.compute_bytes;
  }
  if (!is_editing_layer(l)) return figures;
  if (work_.statistics && !work_.statistics_on_host) figures.statistics = m.mlp_width * m.mlp_width * kDouble;
  if (work_.train_weights) figures.optimiser += m.mlp_width * m.hidden * 3 * kFloat;
  // Targets are optimised at the last editing layer: value, gradient and two moments.
  const auto last = *std::max_element(work_.editing_layers.begin(), work_.editing_layers.end());
  if (work_.gradients && l == last) figures.optimiser += 4 * work_.facts * m.hidden * kFloat;
  return figures;
}

Figures MemoryModel::of_embedding() const {
  Figures figures;
  figures.weights = model_.embedding_bytes;
  return figures;
}

Figures MemoryModel::of_position() const {
  Figures figures;
  figures.weights = model_.position_bytes;
  return figures;
}

Figures MemoryModel::of_final_norm() const {
  Figures figures;
  figures.weights = model_.final_norm_bytes;
  return figures;
}

Figures MemoryModel::of_head(bool with_embedding) const {
  Figures figures;
  figures.weights = model_.tied ? (with_embedding ? 0 : model_.embedding_bytes) : model_.head_bytes;
  // Logits and their log-softmax, and the gradient of one of them.
  figures.activations = work_.rows * work_.scored_tokens * model_.vocab * kFloat * (work_.gradients ? 3 : 2);
  return figures;
}

Figures MemoryModel::of_device(c10::Device device, bool has_layer, bool has_editing_layer) const {
  const auto& m = model_;
  Figures figures;
  if (device.is_cuda()) figures.reserved = kCudaReserve;
  if (has_layer && work_.rows > 0) {
    // Live at the widest point of a block, if it drops nothing before its end: residuals, normed inputs and outputs
    // (8D), the attention's projections before and after the rotation, the MLP's intermediates; and the padding mask.
    const int64_t attention = 2 * (m.heads + 2 * m.kv_heads) * m.head_dim;
    const int64_t per_token = 8 * m.hidden + attention + m.mlp_width * (m.gated_mlp ? 3 : 2);
    figures.activations = work_.rows * work_.tokens * per_token * m.compute_bytes;
    if (work_.rows > 1) figures.activations += work_.rows * work_.tokens * work_.tokens * m.compute_bytes;
  }
  if (has_editing_layer && work_.solve) {
    // The system and its factor, right-hand sides and solution, and the residuals.
    figures.solve = (2 * m.mlp_width * m.mlp_width + 2 * m.mlp_width * work_.facts + m.hidden * work_.facts) * kDouble;
  }
  return figures;
}

std::vector<std::pair<c10::Device, Figures>> MemoryModel::account(const PlacementPlan& plan) const {
  std::vector<std::pair<c10::Device, Figures>> result;
  const auto at = [&result](c10::Device device) -> Figures& {
    for (auto& [known, figures] : result)
      if (known == device) return figures;
    return result.emplace_back(device, Figures{}).second;
  };
  at(plan.embedding) += of_embedding();
  if (model_.position_bytes > 0) at(plan.position) += of_position();
  for (size_t l = 0; l < plan.layers.size(); ++l) at(plan.layers[l]) += of_layer(static_cast<int64_t>(l));
  at(plan.final_norm) += of_final_norm();
  at(plan.head) += of_head(plan.head == plan.embedding);
  const bool host_solves = work_.statistics_on_host && !work_.editing_layers.empty();
  const c10::Device host(c10::kCPU);
  if (host_solves) {
    at(host).statistics +=
        static_cast<int64_t>(work_.editing_layers.size()) * model_.mlp_width * model_.mlp_width * kDouble;
  }
  for (auto& [device, figures] : result) {
    bool has_layer = false, edits = false;
    for (size_t l = 0; l < plan.layers.size(); ++l) {
      if (plan.layers[l] != device) continue;
      has_layer = true;
      edits |= is_editing_layer(static_cast<int64_t>(l));
    }
    figures += of_device(device, has_layer, host_solves ? device == host : edits);
  }
  return result;
}

}  // namespace emend::devices
