// Low-rank adapters on the linear layers of a model, for training (Hu et al. 2021, arXiv 2106.09685).
//
//   LoraAdapters adapters(model, {.rank = 8, .alpha = 16});
//   … gradients with respect to adapters.parameters(), an optimiser …
//   std::vector<WeightDelta> deltas = adapters.deltas();     // ΔW = (alpha/rank)·B·A
//
//   I input width · O output width · R rank
#pragma once

#include <emend/editors/steps/delta.h>
#include <emend/models/model.h>

namespace emend::editors {

struct LoraShape {
  int64_t rank = 8;
  double alpha = 16;   ///< ΔW = (alpha/rank)·B·A
  double dropout = 0;  ///< share of a layer's inputs left out in training
  /// Names of modules ("q_proj", "self_attn.q_proj") whose weights get an adapter; "all-linear" means every linear
  /// layer of the blocks. Empty: the query and value projections, or the fused one, as peft chooses.
  std::vector<std::string> target_modules;
  std::vector<int64_t> layers;  ///< blocks; empty: all
  uint64_t seed = 0;            ///< of A and of the dropout masks
};

/// Adapters attached for the lifetime of the object. A is uniform in ±sqrt(1/I) (as peft draws it), B is zero, so that
/// a new adapter changes nothing. Factors are float32 (float64 in a float64 model) on the device of their weight.
class LoraAdapters {
 public:
  /// Throws Error(kInvalidArgument) for a rank, dropout or layer out of range, and for target modules that name no
  /// linear layer, with the names that exist.
  LoraAdapters(models::Model& model, const LoraShape& shape);
  ~LoraAdapters();
  LoraAdapters(const LoraAdapters&) = delete;
  LoraAdapters& operator=(const LoraAdapters&) = delete;

  /// A and B of every weight, in turn; they require gradients.
  [[nodiscard]] std::vector<at::Tensor> parameters() const;
  [[nodiscard]] int64_t parameter_count() const;
  [[nodiscard]] const std::vector<std::string>& weights() const noexcept { return weights_; }
  /// Those of the weights, in their order; what is put into them counts from the next pass on.
  [[nodiscard]] const std::vector<std::shared_ptr<models::LinearAdapter>>& adapters() const noexcept {
    return adapters_;
  }
  /// Lowest block with an adapter.
  [[nodiscard]] int first_layer() const noexcept { return first_layer_; }

  /// Switches dropout on or off (off at first).
  void set_training(bool training);
  /// The state of the dropout masks, so that a recomputed forward pass draws the same ones.
  [[nodiscard]] std::vector<at::Tensor> dropout_state() const;
  void set_dropout_state(const std::vector<at::Tensor>& state);

  /// What the adapters add to their weights, as factors: left = (alpha/rank)·B [O,R], right = Aᵀ [I,R].
  [[nodiscard]] std::vector<WeightDelta> deltas() const;

 private:
  models::Model* model_;
  LoraShape shape_;
  int first_layer_ = 0;
  std::vector<std::string> weights_;
  std::vector<int> layers_;
  std::vector<std::shared_ptr<models::LinearAdapter>> adapters_;
  std::vector<at::Generator> generators_;
};

}  // namespace emend::editors
