// What an edit is given besides model, facts and hyper-parameters: settings, which a program chooses and which decide
// the result, and what the program lends for the time of the call, which does not.
#pragma once

#include <emend/core/cancel.h>
#include <emend/core/log.h>
#include <emend/devices/work_sharing.h>
#include <emend/editors/steps/contexts.h>
#include <emend/editors/steps/transaction.h>

#include <map>
#include <span>
#include <string>
#include <vector>

namespace emend::editors {

class StatisticsProvider;

/// kFast batches facts, reuses everything that cannot change between steps and computes only what the loss reads.
/// kReference works as the published code does (one fact at a time, whole padded sentences, the whole model each step):
/// the oracle of the tests and the baseline of the benchmark. Both give the same numbers up to rounding.
enum class Engine { kFast, kReference };
[[nodiscard]] std::string_view to_string(Engine engine) noexcept;
/// Throws Error(kInvalidArgument).
[[nodiscard]] Engine parse_engine(std::string_view text);

/// Intermediate tensors by name, on the host: "z.7.delta_steps", "layer.4.keys", … (docs/editors.md lists them).
using Trace = std::map<std::string, at::Tensor>;

/// What is chosen. Nothing besides it, model, facts, hyper-parameters and statistics decides the result.
struct EditSettings {
  uint64_t seed = 0;  ///< of sampled context templates (and of anything else an editor samples)
  Engine engine = Engine::kFast;
  /// Sentences put in front of the prompts. Absent: sampled from the model with `seed` at the first edit; the editor
  /// keeps them for later batches, and the result records them.
  std::optional<ContextTemplates> contexts = {};
  at::ScalarType solve_dtype = at::kDouble;  ///< float64 (default) or float32
  /// In which the fast engine runs the frozen layers while targets are optimised (a copy of them, made for the phase);
  /// δ, loss and optimiser stay float32. Absent: the model's own dtype. See models/compute_copy.h.
  std::optional<at::ScalarType> compute_dtype = {};
  bool tf32 = false;                ///< on GPUs, the fast engine multiplies float32 matrices in TF32 in that phase
  int64_t max_facts_per_batch = 0;  ///< facts whose targets are optimised at once; 0: planned from memory
  int target_lanes = 0;  ///< sets that those facts are shared out among, to overlap; 0: one for each GPU of the layers

  /// The model's own arithmetic.
  [[nodiscard]] bool plain_arithmetic(const models::Model& model) const;
  /// For documents: "float32", "tf32", "bfloat16" or "float64".
  [[nodiscard]] std::string arithmetic_name(const models::Model& model) const;
};

/// The choices of a program as people write them.
struct EditChoices {
  uint64_t seed = 0;
  Engine engine = Engine::kFast;
  std::optional<ContextTemplates> contexts = {};
  at::ScalarType solve_dtype = at::kDouble;
  /// "auto" (bfloat16 where the devices multiply it natively, for the fast engine on a float32 model; else the model's
  /// own), "float32", "tf32", "bfloat16" or "float64"; empty: the model's own.
  std::string compute_dtype = {};
};
/// EditSettings::compute_dtype for a model in `model` on these devices, which need not be loaded; a copy is made where
/// it is another dtype. Throws Error(kInvalidArgument) for an unknown one.
[[nodiscard]] std::optional<at::ScalarType> arithmetic_of(const EditChoices& choices, at::ScalarType model,
                                                          std::span<const c10::Device> devices);
/// The settings for this model. Throws Error(kInvalidArgument) for an unknown arithmetic, for tf32 with another model
/// than float32 or without a GPU, and for the reference engine with another arithmetic than the model's.
[[nodiscard]] EditSettings make_settings(const EditChoices& choices, const models::Model& model);

/// What a program lends: none of it is written to but the trace, and none is kept after the call.
struct EditLoans {
  /// Second moments of the keys. Null is an Error(kInvalidArgument) for editors that need them.
  StatisticsProvider* statistics = nullptr;
  /// If named, original weights are also kept there before the first write, so that the caller can undo several edits.
  TransactionRef transaction = {};
  /// The processes that edit together, each with the same model, facts and settings: they share the optimisation of
  /// targets and sample contexts once; everything else each does for itself, with the same outcome.
  devices::WorkSharing sharing = {};
  /// Neurons that other edits of the loaded model have taken, by the name of W_down: `latch` takes none of them.
  std::map<std::string, std::vector<int64_t>> taken_neurons = {};
  CancelToken cancel = {};
  ProgressFn progress = {};
  Log log = {};
  /// Tells `progress`, if there is one.
  void report(const char* phase, double done, double total, std::string detail = {}) const {
    if (progress) progress({phase, done, total, std::move(detail)});
  }
  /// If set, editors record their intermediate tensors there (tests, fixtures; slow and large).
  Trace* trace = nullptr;
};

/// Both, for one call of an editor: EditContext{make_settings(…), {.statistics = &statistics, …}}.
struct EditContext : EditSettings, EditLoans {};

}  // namespace emend::editors
