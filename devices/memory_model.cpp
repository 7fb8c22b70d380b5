#include <emend/core/error.h>
#include <emend/devices/memory_model.h>

namespace emend::devices {
namespace {

constexpr int64_t kDouble = 8;
constexpr int64_t kFloat = 4;

}  // namespace

nlohmann::ordered_json Figures::to_json() const {
  return {{"weights", weights},   {"activations", activations}, {"statistics", statistics},
          {"solve", solve},       {"kv_cache", kv_cache},       {"optimiser", optimiser},
          {"reserved", reserved}, {"total", total()},           {"limit", limit}};
}

Figures& operator+=(Figures& a, const Figures& b) {
  for (const auto part : {&Figures::weights, &Figures::activations, &Figures::statistics, &Figures::solve,
                          &Figures::kv_cache, &Figures::optimiser, &Figures::reserved})
    a.*part += b.*part;
  return a;
}

MemoryModel::MemoryModel(ModelShape model, WorkShape work, bool stand_ins)
    : model_(std::move(model)), work_(std::move(work)), stand_ins_(stand_ins) {
  for (const int64_t size :
       {model_.n_layers, model_.hidden, model_.mlp_width, model_.vocab, work_.rows, work_.tokens, work_.suffix_tokens,
        work_.scored_tokens, work_.facts, work_.cached_tokens, work_.copy_bytes})
    if (size < 0) refuse({"plan", "a size of " + std::to_string(size), "0 or more", ""});
  if (std::ssize(model_.layer_bytes) != model_.n_layers)
    refuse({"plan", std::to_string(model_.layer_bytes.size()) + " layer sizes",
            std::to_string(model_.n_layers) + ", one a layer", ""});
  for (const int64_t l : work_.editing_layers)
    if (l < 0 || l >= model_.n_layers)
      refuse({"plan", "editing layer " + std::to_string(l), "0 to " + std::to_string(model_.n_layers - 1), ""});
  if (work_.suffix_tokens == 0) work_.suffix_tokens = work_.tokens;
  if (work_.scored_tokens == 0) work_.scored_tokens = work_.suffix_tokens;
}

Figures MemoryModel::of_layer(int64_t l) const {
  const auto& m = model_;
  Figures figures;
  figures.weights = m.layer_bytes[static_cast<size_t>(l)];
  const bool above = work_.gradients && l >= work_.first_gradient_layer;
  if (above || !work_.gradients)
    figures.kv_cache =
        2 * work_.cached_tokens * m.kv_heads * m.head_dim * (above ? gradient_element() : m.compute_bytes);
  if (above) {
    // Kept for the backward pass, weights being frozen: the inputs of the norms, rotated q and k, v, the attention's
    // output (and the fused projection, of which v is a view), and the MLP's gate, its activation and up, or its
    // activation's input; a few numbers a head and norm.
    const int64_t per_token = (m.parallel ? 1 : 2) * m.hidden + (2 * m.heads + 2 * m.kv_heads) * m.head_dim +
                              (m.fused_qkv && m.rotary_dim > 0 ? (m.heads + m.kv_heads) * m.head_dim : 0) +
                              (m.qk_norm ? (m.heads + m.kv_heads) * m.head_dim : 0) +
                              m.mlp_width * (m.gated_mlp ? 3 : 1) + m.heads + 2;
    figures.activations = work_.rows * work_.suffix_tokens * per_token * gradient_element();
  }
  const int64_t own = figures.weights;
  if (above || work_.copies_all) figures.weights += copied(own);
  if (above && work_.copies_all && work_.copies_above) figures.weights += copied(own);
  if (!is_editing_layer(l)) return figures;
  if (work_.statistics && !work_.statistics_on_host) figures.statistics = m.mlp_width * m.mlp_width * kDouble;
  if (work_.train_weights) figures.optimiser += m.mlp_width * m.hidden * 3 * kFloat;
  // Targets are optimised at the last editing layer: value, gradient and two moments.
  const auto last = *std::ranges::max_element(work_.editing_layers);
  if (work_.gradients && l == last) figures.optimiser += 4 * work_.facts * m.hidden * kFloat;
  return figures;
}

// The residual stream, the normed input, the attention's branch and the MLP's input (4D), the MLP's intermediates, and
// the rotary tables; or, where heads are wide, the attention's projections (keys and values not if they are in a
// cache, which those below gradients are not). Rows of different lengths need a mask of tokens² numbers a row, and save
// more than that: padding is not computed.
int64_t MemoryModel::live_forward() const {
  const auto& m = model_;
  const int64_t attention = m.heads * m.head_dim, kv = m.kv_heads * m.head_dim;
  const int64_t mlp = 4 * m.hidden + m.mlp_width * (m.gated_mlp && !m.gate_in_place ? 4 : 2);
  const bool in_cache = work_.cached_tokens > 0 && !work_.gradients;
  const int64_t rotation = 2 * m.hidden + 4 * attention + (in_cache ? 0 : 2 * kv);
  const int64_t per_token = std::max(mlp, m.rotary_dim > 0 ? rotation : 0) + 2 * m.rotary_dim;
  return work_.rows * work_.tokens * per_token * m.compute_bytes;
}

// The gradient of the residual stream and those of the MLP's intermediates.
int64_t MemoryModel::live_backward() const {
  const auto& m = model_;
  const int64_t per_token = m.hidden + m.mlp_width * (m.gated_mlp ? 3 : 2) + 2 * m.rotary_dim;
  return work_.rows * work_.suffix_tokens * per_token * gradient_element();
}

// The logits' log-softmax; with them, or with its gradient, 2; on the way back 3.
int64_t MemoryModel::logits(int copies) const {
  return work_.rows * work_.scored_tokens * model_.vocab * kFloat * copies;
}

int64_t MemoryModel::activations_of(const std::vector<int64_t>& layers, bool has_embedding, bool has_head) const {
  if (work_.rows == 0) return 0;
  const int64_t hidden = work_.rows * work_.tokens * model_.hidden * model_.compute_bytes;
  const int64_t scored = work_.rows * work_.scored_tokens * model_.hidden * model_.compute_bytes;
  int64_t before = has_embedding ? hidden : 0, kept = 0, on_top = 0;
  for (const int64_t l : layers) {
    if (!work_.gradients || l < work_.first_gradient_layer) {
      before = std::max(before, live_forward());
      continue;
    }
    kept +=
        of_layer(l).activations + (l == work_.first_gradient_layer ? hidden : 0);  // and what enters, for later steps
    on_top = live_backward() + (has_head ? logits(1) : 0);
  }
  if (has_head) {
    const int64_t input = work_.gradients ? scored : layers.empty() ? 0 : hidden;
    on_top = std::max(on_top, of_head(true).activations + input);
  }
  return std::max(before, kept + on_top);
}

Figures MemoryModel::of_head(bool with_embedding) const {
  Figures figures;
  const bool shared = model_.tied && with_embedding;
  const int64_t bytes = model_.tied ? model_.embedding_bytes : model_.head_bytes;
  figures.weights = shared ? 0 : bytes;
  if (!shared || !work_.copies_all) figures.weights += copied(bytes);  // else the embedding's copy serves
  if (work_.gradients && work_.copies_all && work_.copies_above) figures.weights += copied(bytes);
  figures.activations = logits(work_.gradients ? 3 : 2);
  return figures;
}

Figures MemoryModel::of_device(c10::Device device, bool has_layer, bool has_editing_layer) const {
  const auto& m = model_;
  Figures figures;
  if (is_gpu(device, stand_ins_)) figures.reserved = kCudaReserve;
  if (has_layer && work_.rows > 0) {
    figures.activations = std::max(live_forward(), work_.gradients ? live_backward() : 0);
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
    at(host).statistics += std::ssize(work_.editing_layers) * model_.mlp_width * model_.mlp_width * kDouble;
  }
  for (auto& [device, figures] : result) {
    std::vector<int64_t> layers;
    bool edits = false;
    for (size_t l = 0; l < plan.layers.size(); ++l) {
      if (plan.layers[l] != device) continue;
      layers.push_back(static_cast<int64_t>(l));
      edits |= is_editing_layer(static_cast<int64_t>(l));
    }
    figures += of_device(device, !layers.empty(), host_solves ? device == host : edits);
    figures.activations = activations_of(layers, device == plan.embedding, device == plan.head);
  }
  return result;
}

}  // namespace emend::devices
