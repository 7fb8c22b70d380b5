// Epochs over facts in chunks: the loop of the editors that train (fine-tuning, LoRA, GRACE).
#pragma once

#include <emend/editors/steps/learning_pass.h>
#include <emend/editors/steps/locate.h>

namespace emend::editors {

struct TrainingOptions {
  int64_t epochs = 25;
  int64_t batch_size = 64;  ///< facts in one step
  double stop_loss = 0;     ///< a chunk below it is not trained on; an epoch below it is the last
  int first_layer = 0;      ///< lowest block that is trained
};

/// What differs between editors.
struct TrainingSteps {
  /// Rows of the facts [begin, end), one a fact.
  std::function<std::vector<LearningRow>(int64_t begin, int64_t end)> rows;
  /// Before each pass over them; may be empty.
  std::function<void(int64_t begin, int64_t end)> prepare = {};
  /// What gradients are taken for.
  std::function<std::vector<at::Tensor>()> leaves;
  /// Moves the variables by the gradient of the chunk's mean loss.
  std::function<void(const PassResult& result)> update;
  /// After training, before the losses are measured once more; may be empty.
  std::function<void()> finish = {};
  /// What the loss has beside the facts' own, for `stop_loss`; may be empty.
  std::function<double()> more = {};
};

struct TrainingRecord {
  std::vector<std::vector<LossTerms>> curve;  ///< one a fact; the last entry was measured after the last update
  std::vector<double> batch_losses, epoch_losses;
  int64_t updates = 0;
};

/// Trains on `facts` facts. Uses from the context: engine, cancel, progress. Throws Error(kNumeric) for a loss that is
/// not finite, Error(kCancelled).
[[nodiscard]] TrainingRecord train(const models::Model& model, int64_t facts, const TrainingOptions& options,
                                   const TrainingSteps& steps, const EditContext& context);

/// Facts [begin, end) of a batch, with their places.
[[nodiscard]] RenderedBatch slice(const RenderedBatch& batch, size_t begin, size_t end);

/// Rows of the facts [begin, end).
[[nodiscard]] std::vector<LearningRow> learning_rows(const RenderedBatch& batch, int64_t begin, int64_t end,
                                                     Objective objective);

/// The frame of an edit that needs the plain prompts alone: renders, fills the head of the
/// result, and times `work`, which is called if any fact could be rendered.
[[nodiscard]] EditResult edit_plain_prompts(const Editor& editor, const models::Model& model,
                                            std::span<const datasets::Fact> facts, const EditContext& context,
                                            const std::function<void(const RenderedBatch&, EditResult&)>& work);

/// Outcomes of the rendered facts from their curves: converged below `stop_loss`.
void note_outcomes(EditResult& result, const models::Model& model, const RenderedBatch& batch,
                   const TrainingRecord& record, double stop_loss);

}  // namespace emend::editors
