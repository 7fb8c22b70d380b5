// The two implementations behind optimise_targets.
#pragma once

#include <emend/editors/steps/targets.h>

#include <functional>
#include <mutex>
#include <span>
#include <string>

namespace emend::editors::detail {

/// One problem at a time, as published: whole padded sentences through the whole model at every step.
[[nodiscard]] Target optimise_reference(const models::Model& model, const TargetProblem& problem,
                                        const TargetSpec& spec, const EditContext& context);

/// How far the targets have come, told from any thread, one at a time.
class TargetProgress {
 public:
  TargetProgress(const ProgressFn& progress, size_t facts) : progress_(progress), facts_(facts) {}
  void finished(double loss);
  void step(const LossTerms& last);  ///< of one that goes on

 private:
  void tell(const std::string& detail) const;  ///< "3/8 facts" and `detail`

  const ProgressFn& progress_;
  size_t facts_, done_ = 0;
  std::mutex mutex_;
};

/// All problems, in batches.
[[nodiscard]] std::vector<Target> optimise_fast(const models::Model& model, const std::vector<TargetProblem>& problems,
                                                const TargetSpec& spec, const EditContext& context,
                                                TargetProgress& told);

/// Some of them. `upper` runs the layers above: `model` itself or a copy of it.
void optimise_part(const models::Model& model, const models::Model& upper, std::span<const TargetProblem> problems,
                   const TargetSpec& spec, const EditContext& context, TargetProgress& told, std::span<Target> targets);

/// What `optimise` makes of all problems, each process of its share; everyone gets all targets, the same bits. Traces
/// do not travel: see optimise_targets.
[[nodiscard]] std::vector<Target> share_targets(
    const std::vector<TargetProblem>& problems, const devices::WorkSharing& sharing,
    const std::function<std::vector<Target>(const std::vector<TargetProblem>&)>& optimise);

/// What TargetSpec::watched_loss is too large by for rows that facts share: it counts pairs of rows, and each fact
/// brings the same contexts.
[[nodiscard]] inline double watched_divisor(const TargetProblem& problem) {
  return static_cast<double>(problem.shared_by) * static_cast<double>(problem.shared_by);
}

/// Whether the stop rule is met, in terms that both engines have.
struct StopState {
  double nll_factor_scale = 1;  ///< kArgmax: 0.1 while the target is the argmax everywhere
  int64_t hits = 0;             ///< kMostProbable
};
struct StopInputs {
  double loss = 0, kl = 0;
  bool all_argmax = false;      ///< every labelled position of every rewriting row
  bool sampled_argmax = false;  ///< every labelled position of the sampled-context rows
  double probability = 0;       ///< weighted mean over the rewriting rows of exp(-nll of the row)
};
[[nodiscard]] inline bool stop_now(const TargetSpec& spec, const StopInputs& inputs, StopState& state) {
  const bool low = inputs.loss < spec.stop_loss;
  switch (spec.stop_rule) {
    case StopRule::kLoss:
      return low;
    case StopRule::kArgmax:
      state.nll_factor_scale = inputs.all_argmax ? 0.1 : 1;
      return (inputs.all_argmax && inputs.kl <= 0.01) || low;
    case StopRule::kMostProbable:
      if (inputs.sampled_argmax) ++state.hits;
      return state.hits >= spec.patience || low;
    case StopRule::kProbability:
      return inputs.probability > spec.stop_probability || low;
  }
  return low;
}

/// Status of an optimisation that ended without meeting its rule.
[[nodiscard]] inline FactStatus unmet_status(double delta_norm, double initial_norm, double clamp_norm_factor) {
  return delta_norm >= clamp_norm_factor * initial_norm * (1 - 1e-4) ? FactStatus::kClamped : FactStatus::kMaxSteps;
}

/// Traces of one problem while it runs.
struct TraceState {
  explicit TraceState(size_t sites) : deltas(sites), gradients(sites) {}
  std::vector<std::vector<at::Tensor>> deltas, gradients;  ///< [site][step]
  std::vector<at::Tensor> nll_each;
  void store(Target& target) const;
};
/// dtype of δ, Adam and the loss: float32, or float64 for a float64 model.
[[nodiscard]] inline at::ScalarType work_dtype(const models::Model& model) {
  return model.dtype() == at::kDouble ? at::kDouble : at::kFloat;
}

/// What fills rows of the reference engine up to one width, as the published code does.
[[nodiscard]] int64_t pad_token(const models::Model& model);

/// β1, β2 and ε of Adam, as the published implementations leave them.
inline constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEpsilon = 1e-8;

}  // namespace emend::editors::detail
