// How many bytes a model and the work on it take on each device. Plain arithmetic on shapes: nothing is loaded.
//
// Legend: R rows · T tokens a row · S tokens a row that carry gradients · D model width · F MLP width · V
// vocabulary · L layers · E facts.
#pragma once

#include <emend/devices/placement.h>

#include <algorithm>

namespace emend::devices {

/// Sizes of a decoder. The bytes come from the checkpoint's header.
struct ModelShape {
  int64_t n_layers = 0;
  int64_t hidden = 0;     ///< D
  int64_t mlp_width = 0;  ///< F: also the width of the keys of an edited matrix
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t vocab = 0;      ///< V
  int64_t positions = 0;  ///< rows of a learned position embedding, or 0
  bool gated_mlp = true;  ///< the MLP has a gate matrix beside the up projection
  bool tied = false;      ///< the head is the embedding
  // What decides how much of a block is alive at once.
  int64_t rotary_dim = 0;     ///< rotated dimensions of a head, or 0
  bool parallel = false;      ///< attention and MLP read the same hidden state
  bool fused_qkv = false;     ///< one matrix for q, k and v: keys and values are views of its output
  bool qk_norm = false;       ///< queries and keys are normed, head by head
  bool gate_in_place = true;  ///< SiLU: without gradients the gate's activation takes no memory of its own

  int64_t weight_bytes = 4;   ///< of one stored weight element
  int64_t compute_bytes = 4;  ///< of one activation element

  int64_t embedding_bytes = 0, position_bytes = 0;
  std::vector<int64_t> layer_bytes;
  int64_t final_norm_bytes = 0;
  int64_t head_bytes = 0;  ///< 0 when tied
};

/// What is to be done with it. Zeros mean: not at all.
struct WorkShape {
  int64_t rows = 0;        ///< R: rows of a batch
  int64_t tokens = 0;      ///< T: tokens of a row, padding included
  bool gradients = false;  ///< backward passes through the layers from `first_gradient_layer` on
  int64_t first_gradient_layer = 0;
  int64_t suffix_tokens = 0;  ///< S: tokens of a row that carry gradients; 0 = all T
  int64_t scored_tokens = 0;  ///< tokens of a row whose logits are made; 0 = S
  int64_t facts = 0;          ///< E: facts of a batch
  std::vector<int64_t> editing_layers;
  bool statistics = false;          ///< a second moment F × F in float64 for every editing layer
  bool statistics_on_host = false;  ///< kept, and solved with, in host memory instead of with the layer
  bool solve = false;               ///< solves with the second moment, one layer at a time
  bool train_weights = false;       ///< the editing layers' matrices are optimised themselves (fine-tuning, Adam)
  /// Tokens in the KV cache, over all rows. With gradients only the layers from `first_gradient_layer` on keep them:
  /// the prompts' beginnings, which no step changes.
  int64_t cached_tokens = 0;
  /// Bytes of an element of the copy of the gradient layers and the head that computes them in another dtype
  /// (models/compute_copy.h); 0: the model does.
  int64_t copy_bytes = 0;
  bool copies_all = false;    ///< that copy is of the whole model, and is there without gradients too
  bool copies_above = false;  ///< the gradient layers and the head have one more beside it (on GPUs)
};

/// Bytes on one device, by what they are for.
struct Figures {
  int64_t weights = 0;
  int64_t activations = 0;  ///< of one batch, with what autograd keeps
  int64_t statistics = 0;
  int64_t solve = 0;
  int64_t kv_cache = 0;
  int64_t optimiser = 0;  ///< optimised values, their gradients and Adam's moments
  int64_t reserved = 0;   ///< CUDA's context and workspaces
  int64_t limit = 0;      ///< what the device may hold

  [[nodiscard]] int64_t total() const {
    return weights + activations + statistics + solve + kv_cache + optimiser + reserved;
  }
  [[nodiscard]] nlohmann::ordered_json to_json() const;  ///< bytes under the names of the members
};

/// CUDA's context, cuBLAS workspaces and the allocator's rounding, taken off every GPU.
inline constexpr int64_t kCudaReserve = 512LL << 20;

/// Whether CUDA takes its share of a device: a GPU, or a simulated device that stands for one that is not here.
[[nodiscard]] inline bool is_gpu(c10::Device device, bool stand_ins) noexcept {
  return device.is_cuda() || (stand_ins && device.type() == kSimulated);
}

/// Counts for one model and one piece of work.
class MemoryModel {
 public:
  /// `stand_ins`: simulated devices stand for GPUs. Throws Error(kInvalidArgument) for negative sizes, byte counts that
  /// do not match n_layers, and editing layers outside the model.
  MemoryModel(ModelShape model, WorkShape work, bool stand_ins = false);

  [[nodiscard]] const ModelShape& model() const noexcept { return model_; }
  [[nodiscard]] const WorkShape& work() const noexcept { return work_; }

  /// What layer `l` brings wherever it is put: weights, cache, statistics, optimiser state, saved activations.
  [[nodiscard]] Figures of_layer(int64_t l) const;
  [[nodiscard]] Figures of_embedding() const { return below(model_.embedding_bytes); }
  [[nodiscard]] Figures of_position() const { return below(model_.position_bytes); }
  [[nodiscard]] Figures of_final_norm() const { return {.weights = model_.final_norm_bytes}; }
  /// `with_embedding`: on the embedding's device, so a tied head brings no weights of its own.
  [[nodiscard]] Figures of_head(bool with_embedding) const;
  /// What a device needs once if it has any layer; `has_editing_layer` adds the solve's workspace.
  [[nodiscard]] Figures of_device(c10::Device device, bool has_layer, bool has_editing_layer) const;
  /// Activations of a device that holds these parts at their widest moment. That is less than the sum of the parts'
  /// activations: a block's are gone when the head's logits are made.
  [[nodiscard]] int64_t activations_of(const std::vector<int64_t>& layers, bool has_embedding, bool has_head) const;
  [[nodiscard]] bool is_editing_layer(int64_t l) const { return std::ranges::count(work_.editing_layers, l) > 0; }

  /// Figures of every device that the plan uses, and of the CPU if the work uses it; limits are left at 0.
  [[nodiscard]] std::vector<std::pair<c10::Device, Figures>> account(const PlacementPlan& plan) const;

 private:
  [[nodiscard]] int64_t live_forward() const;   // bytes of one block without gradients, at its widest moment
  [[nodiscard]] int64_t live_backward() const;  // the same on the way back, without what was kept
  [[nodiscard]] int64_t logits(int copies) const;
  // Bytes of the copy of so many bytes of weights, and of an activation that carries gradients.
  [[nodiscard]] int64_t copied(int64_t bytes) const {
    return work_.gradients || work_.copies_all ? bytes / model_.weight_bytes * work_.copy_bytes : 0;
  }
  // Weights in front of the first layer.
  [[nodiscard]] Figures below(int64_t bytes) const {
    return {.weights = bytes + (work_.copies_all ? copied(bytes) : 0)};
  }
  [[nodiscard]] int64_t gradient_element() const noexcept {
    return work_.copy_bytes > 0 ? work_.copy_bytes : model_.compute_bytes;
  }

  ModelShape model_;
  WorkShape work_;
  bool stand_ins_;
};

/// Adds everything but the limit.
Figures& operator+=(Figures& a, const Figures& b);

}  // namespace emend::devices
