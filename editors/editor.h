// What every editor is given, does and hands back.
//
//   auto editor = editors::make_editor("memit", raw_hparams, model);
//   const auto settings = editors::make_settings({.seed = 3}, model);
//   editors::EditResult result = editor->edit(model, facts, {settings, {.statistics = &statistics}});
//
// Goals: one interface for editors that solve for a weight change and editors that train one; a failed edit leaves no
// trace. Non-goals: choosing hyper-parameters (hparams/), judging the outcome (evaluation/), files (pack.h).
#pragma once

#include <emend/datasets/fact.h>
#include <emend/editors/packs/runtime.h>
#include <emend/editors/settings.h>
#include <emend/editors/steps/delta.h>
#include <emend/models/model.h>

namespace emend::editors {

enum class FactStatus {
  kConverged,  ///< the stop rule was met
  kClamped,    ///< all steps used, the delta lies on the norm limit
  kMaxSteps,   ///< all steps used
  kFailed,     ///< not edited; `reason` says why
};
[[nodiscard]] std::string_view to_string(FactStatus status) noexcept;  ///< "converged", …

/// One iteration of an optimisation, in the terms that published implementations print.
struct LossTerms {
  double loss = 0, nll = 0, kl = 0, weight_decay = 0;
  double probability = 0;  ///< mean over the rewriting rows of exp(-nll of the row)
};

/// What happened to one fact.
struct FactOutcome {
  int64_t case_id = 0;
  FactStatus status = FactStatus::kMaxSteps;
  std::string reason;                       ///< for people; empty unless there is something to say
  int64_t steps = 0;                        ///< updates made
  LossTerms last;                           ///< of the last iteration
  std::vector<LossTerms> curve;             ///< of every iteration; one more entry than `steps` for target optimisation
  double delta_norm = 0, initial_norm = 0;  ///< ‖δ‖ and ‖t0‖ (of the first site)
  /// Tokens of the plain prompt followed by the target, as text; token ranges are half open.
  std::vector<std::string> tokens;
  std::vector<int64_t> token_ids;
  std::pair<int64_t, int64_t> subject_span{0, 0}, target_span{0, 0};
  int64_t lookup = -1;  ///< token where the fact is looked up
};

/// What happened to one rewritten weight.
struct LayerFigures {
  int layer = 0;
  std::string weight;
  double update_norm = 0;           ///< ‖ΔW‖
  double relative_update_norm = 0;  ///< ‖ΔW‖/‖W‖
  double survived = 1;       ///< share of ΔW that the cast to the weight's dtype kept: ⟨written, ΔW⟩/‖ΔW‖²
  double residual_norm = 0;  ///< mean column norm of (Z − current value) before this layer was written
  double key_norm = 0;       ///< mean column norm of the keys
  double condition = 0;      ///< estimate for the solved system; 0 where nothing was solved
  std::string solver;        ///< "push-through", "dense", …; empty where nothing was solved
  double jitter = 0;         ///< added to the diagonal to make the system positive definite; usually 0
};

struct EditResult {
  std::string editor = {};
  nlohmann::json hparams = {};             ///< effective values
  std::vector<WeightDelta> deltas = {};    ///< in the order of writing; a weight may occur more than once
  std::vector<FactOutcome> outcomes = {};  ///< one a fact, in the order given
  std::vector<LayerFigures> layers = {};
  std::map<std::string, double> seconds = {};  ///< "contexts", "statistics", "targets", "insert"
  std::map<std::string, int64_t> flops = {};   ///< of the same phases: operations of products (models::linear_flops)
  std::optional<ContextTemplates> contexts = {};
  Engine engine = Engine::kFast;
  uint64_t seed = 0;

  [[nodiscard]] int64_t failed() const;  ///< facts with the status kFailed
  /// Everything but the deltas' tensors.
  [[nodiscard]] nlohmann::json to_json() const;
};
[[nodiscard]] nlohmann::json to_json(const FactOutcome& outcome, bool with_curve = true);
[[nodiscard]] nlohmann::json to_json(const LayerFigures& figures);  ///< the members by their names
/// What to_json wrote, read back; what is not a number becomes NaN. Throws nlohmann::json::exception for anything else.
[[nodiscard]] FactOutcome outcome_from_json(const nlohmann::json& json);
[[nodiscard]] LayerFigures figures_from_json(const nlohmann::json& json);

/// One editor with its hyper-parameters. An instance belongs to one sequence of edits of one model: editors that
/// remember earlier batches (AlphaEdit, sequential MEMIT) keep that memory here; make a new instance, or reset(), for a
/// fresh start.
class Editor {
 public:
  virtual ~Editor() = default;
  [[nodiscard]] virtual const std::string& name() const = 0;  ///< as in the table of editors
  /// Effective hyper-parameters, as hparams::Schema::dump gives them.
  [[nodiscard]] virtual nlohmann::json hparams() const = 0;
  /// Layers whose second moments edit() will ask for; empty if it needs none.
  [[nodiscard]] virtual std::vector<int> statistics_layers() const { return {}; }

  /// Writes the facts into the model and leaves it edited. If it throws (also Error(kCancelled), Error(kNumeric) for
  /// non-finite values), every weight has the bytes it had before the call, and the instance's memory of earlier
  /// batches is unchanged. Facts that cannot be edited alone come back with status kFailed and a reason; the others are
  /// edited. No facts change nothing: the result has neither deltas nor outcomes.
  [[nodiscard]] virtual EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                        const EditContext& context) = 0;

  /// To be called once after the last batch, by programs that edit in several: editors that correct the sum of all
  /// changes (PRUNE) do it here. Same promises as edit(). Returns nothing where there is nothing to do.
  [[nodiscard]] virtual std::optional<EditResult> finish(models::Model& model, const EditContext& context) {
    (void)model, (void)context;
    return std::nullopt;
  }

  /// What the edits so far add beside the weights, for the pack. While the instance lives they are in force in the
  /// model; reset() takes them out. Empty for editors that change weights.
  [[nodiscard]] virtual std::vector<RuntimePart> runtime() const { return {}; }

  /// What a pack of the edits so far is to say besides (EditPack::extra), an object; nothing by default.
  [[nodiscard]] virtual nlohmann::json extra() const { return nlohmann::json::object(); }

  /// What is to stand in front of a prompt while the edits are in force: IKE tells the facts there.
  [[nodiscard]] virtual std::string prefix(std::string_view prompt) const {
    (void)prompt;
    return {};
  }

  /// Forgets earlier batches: the memory of none is loaded. Contexts that were sampled stay.
  virtual void reset() { load_state({}); }
  /// The memory of earlier batches, for resuming; empty for editors without one. What has not changed should be the
  /// same tensor as last time: it need not be saved again.
  [[nodiscard]] virtual std::map<std::string, at::Tensor> state() const { return {}; }
  virtual void load_state(const std::map<std::string, at::Tensor>& state) { (void)state; }
};

}  // namespace emend::editors
