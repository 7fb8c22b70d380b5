// LoRA fine-tuning on conversations: what `emend tune` does.
//
//   const auto rows = tuning_rows(model, instructions, format, 512, "rows.json");
//   TuneResult result = tune(model, rows.rows, options);      // model keeps its weights; result.deltas are the change
//
// The loss is the mean negative log-likelihood over the labelled tokens (those of the answers) of an optimiser step's
// rows, whatever the number of passes that the step is made of. Adapters, their moments and their gradients live on the
// device of their weight, labels go to the logits; the model may be split in any way.
#pragma once

#include <emend/datasets/instructions.h>
#include <emend/editors/steps/learning_pass.h>
#include <emend/editors/steps/lora.h>
#include <emend/models/chat.h>

namespace emend::editors {

/// A conversation as tokens: labels are the tokens of the assistant's turns, each with the token that ends the turn.
/// Everything else is what a Python trainer marks with -100.
struct TuningRow {
  LearningRow row;
  int64_t line = 0;  ///< in the file
};

struct TuningRows {
  std::vector<TuningRow> rows;
  int64_t cut = 0;      ///< rows that were longer than max_length
  int64_t dropped = 0;  ///< rows whose answers lie beyond max_length
  int64_t labels = 0;
};

/// Renders and encodes conversations, cut to `max_length` tokens. `name` stands for the file in messages.
/// Throws Error(kInvalidArgument) naming line, token, id and the size of the vocabulary for an id that the model's head
/// has no row for; Error(kCorruption) if no row has anything to learn.
[[nodiscard]] TuningRows tuning_rows(const models::Model& model, const std::vector<datasets::Instruction>& instructions,
                                     const models::ChatFormat& format, int64_t max_length, const std::string& name);

/// Throws Error(kInvalidArgument) as tuning_rows does: the check that a library user with rows of their own needs
/// before a loss is computed, where such an id would be reported as an error of the device.
void check_vocabulary(const models::Model& model, const std::vector<TuningRow>& rows, const std::string& name);

struct TuneOptions {
  LoraShape lora;
  double lr = 2e-4;
  double weight_decay = 0;          ///< AdamW's
  int64_t warmup_steps = 0;         ///< the learning rate rises linearly over them
  std::string schedule = "linear";  ///< afterwards: "constant", "linear" (to 0) or "cosine" (to 0)
  int64_t batch_size = 4;           ///< rows of one pass
  int64_t accumulation = 1;         ///< passes of one optimiser step
  double epochs = 1;
  int64_t steps = 0;          ///< optimiser steps; 0: as many as `epochs` need
  double max_grad_norm = 1;   ///< gradients are scaled down to this norm; 0: never
  int checkpoint_layers = 0;  ///< gradient checkpointing in segments of this many layers; 0: none
  uint64_t seed = 0;          ///< of the order of the rows (lora.seed: of adapters and dropout)
  CancelToken cancel;
  ProgressFn progress;  ///< phase "tune", in steps
};

struct TuneStep {
  double loss = 0, lr = 0, grad_norm = 0;  ///< mean over the step's labels, in nat; norm before it was cut
  int64_t labels = 0;
};

struct TuneResult {
  std::vector<WeightDelta> deltas;
  std::vector<TuneStep> steps;
  int64_t parameters = 0;  ///< trained
  double seconds = 0;
};

/// Learning rate of a step, counted from 0.
[[nodiscard]] double learning_rate(const TuneOptions& options, int64_t step, int64_t steps);

/// Trains adapters and takes them off again: the model is as it was. Throws Error(kInvalidArgument) for options out of
/// range and labels outside the vocabulary, Error(kNumeric) for a loss that is not finite, Error(kCancelled).
[[nodiscard]] TuneResult tune(models::Model& model, const std::vector<TuningRow>& rows, const TuneOptions& options);

}  // namespace emend::editors
