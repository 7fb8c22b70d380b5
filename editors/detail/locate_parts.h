// Parts of a locate-then-edit batch that need nothing else of it.
#pragma once

#include <emend/editors/steps/locate.h>

namespace emend::editors::detail {

/// Problems of a batch: one a fact, or one a group of facts that share their key.
struct Grouped {
  std::vector<TargetProblem> problems;
  std::vector<size_t> problem_of_fact;
};
[[nodiscard]] Grouped group_facts(const std::vector<const RenderedFact*>& facts, bool merge_equal_keys, int64_t steps);

/// What the residual of the `index`-th of `count` layers is divided by.
[[nodiscard]] double divisor(ResidualSpread spread, size_t index, size_t count);

/// The share of what each column asked of a layer that the update brings there: 1 without regularisation.
[[nodiscard]] at::Tensor share_reached(const LayerProblem& problem, const WeightDelta& delta);

/// Records what a layer is solved with; nothing without a trace. `rows`: of all contexts, in the order of the keys.
void trace_problem(const EditContext& context, const LayerProblem& problem, const std::vector<PromptRow>& rows,
                   const at::Tensor& keys_PF, const at::Tensor& current_ND, const at::Tensor& remaining_DN);

/// Dense where the factors would have more entries: those of 10,000 facts in GPT-J are three times as large.
[[nodiscard]] WeightDelta smaller_form(WeightDelta delta);

/// The plain prompt of each problem, for one more pass.
[[nodiscard]] std::vector<PromptRow> plain_rows(const std::vector<TargetProblem>& problems);

/// Norm-Anchor Scaling (modifiers.h): the targets with the MLP's part, `mlp` of each, at `norm`. 0 becomes the norm
/// that these targets have.
void anchor_targets(const std::vector<at::Tensor>& mlp, double& norm, std::vector<Target>& targets);

/// What a layer's write was, told to the log too; `remaining_DN`: what targets ask for beyond the current values.
[[nodiscard]] LayerFigures figures_of(const LayerProblem& problem, const LayerUpdate& update, const ApplyReport& report,
                                      const at::Tensor& remaining_DN, const Log& log);

/// Says where no layer brings much of what a fact asks for; `most_reached` by rendered fact. Regularisation that suits
/// a large model holds a small one still.
void warn_if_little(const std::map<size_t, double>& most_reached, const RenderedBatch& batch, EditResult& result,
                    const Log& log);

}  // namespace emend::editors::detail
