// The optimised target vectors: which hidden value at the looked-up token makes the model say the new fact.
//
// For each fact a delta δ (zero at first) is added to the output of one or more modules at the looked-up token of every
// row, and moved by Adam so that loss = nll_factor·nll + kl + weight decay falls:
//   nll   mean over the rewriting rows of −(1/T)Σ log p(target token)
//   kl    kl_factor · KL(edited ‖ original) of the next-token distribution of the KL rows at their looked-up token
//   wd    v_weight_decay · ‖δ‖/‖t0‖², summed over the sites, and what a problem adds of δ alone (own_loss)
// The stop rule is asked before the update, so there are at most steps−1 updates; after each update ‖δ‖ is cut to
// clamp_norm_factor·‖t0‖. t0 is the value at the plain prompt before anything is added.
//
// The two engines give the same numbers up to rounding; the fast one works on all facts at once.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/editors/editor.h>
#include <emend/editors/steps/prompts.h>
#include <emend/hooks/site.h>

#include <functional>
#include <optional>
#include <vector>

namespace emend::editors {

/// When a fact has had enough, besides the last step.
enum class StopRule {
  kLoss,    ///< loss < stop_loss
  kArgmax,  ///< PMET: also when every target token is the most probable one and kl ≤ 0.01; nll counts a tenth while it
            ///< is
  kMostProbable,  ///< ENCORE: when the target is the argmax in all sampled-context rows, `patience` times; also loss <
                  ///< stop_loss
  kProbability,   ///< ENCORE, other form: when the mean probability of the target exceeds stop_probability; also loss <
                  ///< stop_loss
};

struct TargetSpec {
  /// One or two of kLayerOut (MEMIT), kMlpOut (ROME), kMlpDownOut, kAttnOut (PMET), all in one layer. The first one's
  /// t0 counts for reports.
  std::vector<hooks::SiteRef> sites;
  /// nll is read from the head applied to this layer's output without logit soft-caps (MEMIT's v_loss_layer); absent:
  /// from the model's own logits (ROME).
  std::optional<int> loss_layer;
  int64_t steps = 25;
  double lr = 0.5;
  double weight_decay = 0.5;
  double clamp_norm_factor = 0.75;
  double kl_factor = 0.0625;
  double nll_factor = 1;
  double stop_loss = 0.05;
  StopRule stop_rule = StopRule::kLoss;
  int64_t patience = 1;
  double stop_probability = 1;
  /// Steps of a sketch of every problem before its own ones, which then begin with the sketch's δ: its plain rows and
  /// every third of the others, with the same loss and 1.5 times the learning rate. A sketch's step costs less than
  /// half of a whole one, and brings δ nearly as far. 0: none.
  int64_t sketch_steps = 0;
  /// A copy of the whole model as it is now, in the dtype of the phase, if one is at hand: then, on the host and with
  /// nothing attached to the model's hook points, the layers below the sites run in it too. t0 is the model's own.
  const models::Model* copy = nullptr;
  /// A further term of the loss, of what the looked-up tokens of a problem's rows hold at the output of these layers,
  /// all above the sites and none above the one that the nll is read from: [layers, rows, D], work dtype, the first of
  /// these layers' device -> a scalar that can be differentiated. Reported with the weight decay.
  std::vector<int> watched_layers = {};
  std::function<at::Tensor(const at::Tensor& states_LJD)> watched_loss = {};
};

/// A row that δ is added to.
struct TargetRow {
  std::vector<int64_t> ids;
  int64_t lookup = 0;  ///< δ goes here
  /// (token, id): after ids[0..token] the model shall say `id`. Empty for KL rows.
  std::vector<std::pair<int64_t, int64_t>> labels;
  double weight = 0;             ///< of this row's mean nll in the fact's nll; the rows of a problem sum to 1
  bool sampled_context = false;  ///< not the plain prompt (kMostProbable looks at these)
  /// −log p of each label from which on it counts (as good as the model was before is good enough). Empty: from 0 on.
  std::vector<double> floors = {};
  /// Further tokens that δ is added to, behind the looked-up one.
  std::vector<int64_t> also = {};
};

/// A vector that stays added at one token while δ is optimised (earlier windows of a long target).
struct HeldVector {
  size_t row = 0;  ///< index into rows, then KL rows
  int64_t token = 0;
  std::vector<at::Tensor> vectors_D;  ///< one a site
};

/// One optimisation. Usually one fact; facts that share a key may be one problem with all their rows.
struct TargetProblem {
  int64_t case_id = 0;
  std::vector<TargetRow> rows;
  std::vector<TargetRow> kl_rows;
  std::vector<HeldVector> held;
  int64_t more_steps = 0;  ///< beyond TargetSpec::steps
  int64_t shared_by = 1;   ///< facts whose rows these are, each with the same contexts in front
  /// A further term of the loss, of δ and t0 of the first site ([D], work dtype, that site's device): a scalar that can
  /// be differentiated by δ. Reported with the weight decay.
  std::function<at::Tensor(const at::Tensor& delta_D, const at::Tensor& initial_D)> own_loss = {};
  /// δ of the first site before the first step, made from t0; zero without it.
  std::function<at::Tensor(const at::Tensor& initial_D)> start = {};
  /// What KL rows are compared with where there is a start: the model as it is, or with δ as it starts.
  bool kl_before_start = false;
};

/// Every step of one optimisation, on the host.
struct TargetTrace {
  std::vector<at::Tensor> delta_steps;  ///< [steps+1, D] a site, float32
  std::vector<at::Tensor> grad_steps;   ///< [steps, D] a site
  at::Tensor nll_each;                  ///< [iterations, rows]
};

/// The outcome of one problem.
struct Target {
  std::vector<at::Tensor> initial_D;  ///< t0 a site, float32, host
  std::vector<at::Tensor> delta_D;    ///< δ a site
  std::vector<at::Tensor> target_D;   ///< t0 + δ a site
  FactStatus status = FactStatus::kMaxSteps;
  std::string reason;
  std::string withheld;  ///< why it asks for no change, though it stands among the others (Norm-Anchor Scaling)
  int64_t steps = 0;
  std::vector<LossTerms> curve;
  std::optional<TargetTrace> trace;  ///< if the context asks for traces
};

/// The problem of one fact: every context row with the target behind it (equal weights), and the KL rows.
[[nodiscard]] TargetProblem make_target_problem(const RenderedFact& fact);

/// Solves all problems. The model is not changed; its hooks are free afterwards. Uses from the context: engine, batch
/// limit, sharing (unless there is a trace), cancel, progress, log, trace. A fact whose loss is not finite comes back
/// kFailed; the others go on. Throws Error(kInvalidArgument) for sites in different layers, empty problems or token
/// indices out of range.
[[nodiscard]] std::vector<Target> optimise_targets(const models::Model& model,
                                                   const std::vector<TargetProblem>& problems, const TargetSpec& spec,
                                                   const EditContext& context);

/// Records a problem and its target under `prefix`: input_ids, attention_mask, labels, lookup, target_init,
/// delta_steps, grad_steps, nll_each, target_ids, losses [iterations, loss nll kl weight_decay probability], target.
/// With several sites the per-site names end in "_attn" or "_mlp".
void record_target(Trace& trace, const std::string& prefix, const TargetProblem& problem, const Target& target,
                   const TargetSpec& spec);

/// Fills the fields of an outcome that come from a fact's tokens and its target.
[[nodiscard]] FactOutcome make_outcome(const models::Tokenizer& tokenizer, const RenderedFact& fact,
                                       const Target& target);

// Long targets cut into windows, each of which is written like a fact of its own (AnyEdit, Jiang et al., ICML 2025).
//
//   prompt  y0 y1 y2 | y3 y4 y5 | y6 y7        window 0 is looked up where facts are (the subject); window w at the
//        ^subject  ^lookup 1  ^lookup 2        token before it, with everything before it standing in the prompt
//
// The windows of a target are optimised one after the other; δ of the earlier ones stays added while a later one moves.

struct TargetWindows {
  int64_t size = 0;     ///< tokens a window; 0: targets stay whole
  int64_t overlap = 0;  ///< tokens that a window shares with the one before; below `size`
};

/// The windows [begin, end) of a target of so many tokens, in order; they cover it, and only the last may be shorter.
[[nodiscard]] std::vector<std::pair<int64_t, int64_t>> cut_target(int64_t tokens, const TargetWindows& windows);

/// One window of a fact as a fact. The first keeps rows, lookup and KL rows; a later one has the target's tokens before
/// it behind every row, is looked up at the last of them, and has no KL rows: what the subject means is the first
/// window's concern.
[[nodiscard]] RenderedFact window_of(const RenderedFact& fact, std::pair<int64_t, int64_t> window);

/// Keeps the δ of an earlier window added in all rewriting rows of a later one's problem (same rows, same order).
///   anchored  what is written of the target is another than the δ that was found (Norm-Anchor Scaling)
void hold(TargetProblem& problem, const RenderedFact& earlier, const Target& target, bool anchored = false);

/// What a fact's outcome says of its windows: the first one's δ, the sum of the steps, all curves one after the other
/// and the worst status.
[[nodiscard]] Target summarise(const std::vector<const Target*>& windows);

}  // namespace emend::editors
