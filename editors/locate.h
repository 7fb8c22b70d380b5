// What all locate-then-edit methods do around the one step in which they differ.
//
// An editor fills a LocateRecipe, calls run_locate_edit and writes only its layer update. Steps: contexts → prompts → targets →
// for each layer: keys and current values with the model as it is now → residual → the editor's update → apply_delta.
#pragma once

#include <emend/editors/apply.h>
#include <emend/editors/editor.h>
#include <emend/editors/keys.h>
#include <emend/editors/solver.h>
#include <emend/editors/targets.h>
#include <emend/hparams/locate.h>

#include <functional>
#include <string>
#include <vector>

namespace emend::editors {

/// How the residual is shared out over the layers still to come.
enum class ResidualSpread {
  kEqual,  ///< 1/(L−i), MEMIT
  kSqrt,   ///< 1/sqrt(L−i), PMET
  kNone,   ///< all of it in every layer
};

/// What an editor's update sees of one layer. Matrices in paper orientation, solve dtype, on the solve device.
struct LayerProblem {
  int layer = 0;
  size_t index = 0, count = 1;      ///< i-th of L layers
  models::EditSite site;
  at::Tensor keys_FN;               ///< averaged keys
  at::Tensor keys_per_context_PF;   ///< [N·C, F], fact-major
  at::Tensor current_DN;            ///< value now at the target site, plain prompts
  at::Tensor residual_DN;           ///< share of (targets − current) for this layer
  SecondMoment moment;              ///< absent if the recipe needs none
  at::ScalarType dtype = at::kDouble;
};

/// The editor's answer: the delta, and how it was solved.
struct LayerUpdate {
  WeightDelta delta;
  SolveReport solve;
};

/// A layer before and after its update, for tests and fixtures.
struct LayerTrace {
  LayerProblem problem;
  LayerUpdate update;
  at::Tensor weight_change_DF;  ///< what the weight really changed by
};

struct LocateRecipe {
  std::string editor;
  nlohmann::json hparams;
  hparams::LocateHparams common;
  TargetSpec targets;                    ///< see memit_targets
  ContextGrouping grouping = ContextGrouping::kPlainApart;
  KeyWeighting weighting = KeyWeighting::kByGroup;
  ResidualSpread spread = ResidualSpread::kEqual;
  bool needs_statistics = true;
  bool merge_equal_keys = false;         ///< facts with the same subject and the same keys share one target
  std::function<LayerUpdate(const LayerProblem&)> update;
  /// After all layers are written, before the commit; `keys_FN` of each layer with the edited model are collected if set.
  std::function<void(const std::vector<at::Tensor>& keys_FN)> after_edit;
  std::vector<LayerTrace>* layer_traces = nullptr;
};

/// MEMIT's way of optimising: δ at the output of the last of `layers`, loss at v_loss_layer.
[[nodiscard]] TargetSpec memit_targets(const hparams::LocateHparams& hparams, const models::Model& model);
/// ROME's: δ at the MLP output of `layer`, the model's own logits.
[[nodiscard]] TargetSpec rome_targets(const hparams::LocateHparams& hparams, int layer, const models::Model& model);

/// Layers within the model and ascending, v_loss_layer within the model, module names that fit the model, an editable matrix in every layer.
/// Throws Error(kInvalidArgument) naming the key's place in the file.
void check_locate_hparams(const hparams::LocateHparams& hparams, const models::Model& model, const hparams::RawHparams& raw,
                          const Log& log);

/// The contexts of an edit: those of the context, else sampled now (and stored there).
const ContextTemplates& ensure_contexts(const models::Model& model, const hparams::LocateHparams& hparams, ContextGrouping grouping,
                                        EditContext& context);

/// The whole edit of a batch. See Editor::edit for what happens on failure.
[[nodiscard]] EditResult run_locate_edit(models::Model& model, std::span<const datasets::Fact> facts, const LocateRecipe& recipe,
                                         EditContext& context);

}  // namespace emend::editors
