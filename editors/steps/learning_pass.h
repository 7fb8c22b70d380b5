// What all editors that train have in common: rows with labels, their loss, and its gradient with respect to whatever
// the editor trains (weights, adapters, vectors added by a hook).
//
//   LearningPass pass(model, rows, /*first_layer=*/4);
//   pass.run(row_weights, [&] { return std::vector<at::Tensor>{weight}; });
//
// Goals: one forward pass over packed rows, the head applied to labelled tokens alone, nothing below the lowest trained
// layer computed twice. Non-goals: optimisers (optimiser.h), training loops.
//   R rows · M labels · N tokens · D hidden width
#pragma once

#include <emend/editors/editor.h>
#include <emend/editors/steps/prompts.h>
#include <emend/models/batch.h>
#include <emend/models/model.h>

namespace emend::editors {

/// A sentence and what the model shall say in it.
struct LearningRow {
  std::vector<int64_t> ids;
  /// (token, id): after ids[0..token] the model shall say `id`. A token may carry several labels.
  std::vector<std::pair<int64_t, int64_t>> labels;
};

/// Where the target of a fact is scored.
enum class Objective {
  kPromptLast,  ///< all its tokens after the last prompt token (FT-L): not autoregressive
  kTargetNew,   ///< each after the tokens before it (FT-M): what the model will be asked to say
};
/// "prompt_last", "target_new". Throws Error(kInvalidArgument).
[[nodiscard]] Objective parse_objective(std::string_view text);

/// The plain prompt of a fact with its target.
[[nodiscard]] LearningRow learning_row(const RenderedFact& fact, Objective objective);

/// Loss of one pass.
struct PassResult {
  std::vector<double> nll;            ///< mean over the labels of each row
  std::vector<at::Tensor> gradients;  ///< one a leaf, on the leaf's device; empty from measure()
};

/// What a recomputed part of a pass has to draw again as the first time (dropout masks).
struct RandomState {
  std::function<std::vector<at::Tensor>()> save;
  std::function<void(const std::vector<at::Tensor>&)> load;
};

class LearningPass {
 public:
  /// Runs the rows up to `first_layer` (kFast) with the weights as they are: nothing below it may change as long as
  /// this object is used. kReference pads the rows and runs the whole model and head every time. The model must outlive
  /// the pass. Throws Error(kInvalidArgument) for no rows, a row without labels or a label out of range.
  LearningPass(const models::Model& model, const std::vector<LearningRow>& rows, int first_layer,
               Engine engine = Engine::kFast);

  /// Loss and gradient of Σ weight[r]·nll[r]. `leaves` is called once the forward pass has run, so that it may return
  /// what hooks have caught; a leaf that the loss does not depend on gets an undefined gradient.
  /// Throws Error(kNumeric) if a loss is not finite.
  [[nodiscard]] PassResult run(std::span<const double> weight_R,
                               const std::function<std::vector<at::Tensor>()>& leaves) const;
  /// The same, keeping what enters every `layers_per_segment`-th layer and computing the rest again on the way back
  /// (Chen et al. 2016, arXiv 1604.06174): memory for one segment of layers, at the price of a second forward pass.
  /// `leaves` must not depend on what hooks catch. Fast engine only.
  [[nodiscard]] PassResult run_in_segments(std::span<const double> weight_R, const std::vector<at::Tensor>& leaves,
                                           int layers_per_segment, const RandomState& random) const;
  /// The loss alone.
  [[nodiscard]] PassResult measure() const;

  /// The packed rows that hooks see.
  [[nodiscard]] const models::TokenBatch& batch() const noexcept { return batch_; }
  [[nodiscard]] size_t rows() const noexcept { return labels_of_row_.size(); }

 private:
  [[nodiscard]] at::Tensor coefficients(std::span<const double> weight_R) const;
  [[nodiscard]] std::vector<double> row_means(const at::Tensor& nll_M) const;
  [[nodiscard]] at::Tensor forward() const;

  const models::Model* model_;
  Engine engine_;
  int first_layer_ = 0;
  models::TokenBatch batch_;
  mutable std::shared_ptr<models::PassTables> tables_;  ///< of batch_
  at::Tensor entering_ND_;                              ///< input of first_layer_; undefined if that is 0
  std::vector<int64_t> label_token_, label_id_, label_row_, labels_of_row_;
};

/// What enters and leaves the rewritten matrix of one layer, with the loss's gradient at its output:
/// dLoss/dW = gradᵀ·keys.
struct LayerSignal {
  at::Tensor keys_NF, grad_ND;  ///< all tokens of the pass, model's dtype, on the layer's device
};

/// Signals of these layers (ascending, none below the pass's first layer) from one forward and one backward pass.
/// `loss`, if given, receives the rows' losses.
[[nodiscard]] std::vector<LayerSignal> layer_signals(const models::Model& model, const LearningPass& pass,
                                                     const std::vector<int>& layers, std::span<const double> weight_R,
                                                     std::vector<double>* loss = nullptr);

/// Lets weights carry gradients for a scope.
class TrainableScope {
 public:
  explicit TrainableScope(std::vector<at::Tensor> weights);
  ~TrainableScope();
  TrainableScope(const TrainableScope&) = delete;
  TrainableScope& operator=(const TrainableScope&) = delete;
  [[nodiscard]] const std::vector<at::Tensor>& weights() const noexcept { return weights_; }

 private:
  std::vector<at::Tensor> weights_;
};

}  // namespace emend::editors
