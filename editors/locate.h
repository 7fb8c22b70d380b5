// What all locate-then-edit methods do around the one step in which they differ.
//
// An editor derives from LocateEditor, fills a LocateRecipe and writes update(). Steps of edit(): contexts → prompts → targets →
// for each layer: keys and current values with the model as it is now → residual → update() → apply_delta.
#pragma once

#include <emend/editors/apply.h>
#include <emend/editors/editor.h>
#include <emend/editors/keys.h>
#include <emend/editors/solver.h>
#include <emend/editors/targets.h>
#include <emend/hparams/locate.h>

#include <string>
#include <vector>

namespace emend::editors {

/// How the residual is shared out over the layers still to come.
enum class ResidualSpread {
  kEqual,  ///< 1/(L−i), MEMIT
  kSqrt,   ///< 1/sqrt(L−i), PMET
  kNone,   ///< all of it in every layer
};

/// What an editor's update sees of one layer. Matrices in paper orientation, in `dtype`, on the solve device.
struct LayerProblem {
  int layer = 0;
  size_t index = 0, count = 1;   ///< i-th of L layers
  models::EditSite site;
  at::Tensor weight_DF;          ///< the weight as it is now: a view, not to be written; weight's dtype and device
  at::Tensor keys_FN;            ///< averaged keys
  at::Tensor residual_DN;        ///< this layer's share of (targets − current values)
  SecondMoment moment;           ///< absent if the recipe needs none
  at::ScalarType dtype = at::kDouble;
};

/// The editor's answer: the delta, and how it was solved.
struct LayerUpdate {
  WeightDelta delta;
  SolveReport solve;
};

struct LocateRecipe {
  std::string editor;
  nlohmann::json hparams;                ///< effective values, for the record
  hparams::LocateHparams common;
  TargetSpec targets;                    ///< memit_targets, rome_targets, or built by hand
  ContextGrouping grouping = ContextGrouping::kPlainApart;
  KeyWeighting weighting = KeyWeighting::kByGroup;
  ResidualSpread spread = ResidualSpread::kEqual;
  bool needs_statistics = true;
  std::vector<std::string> kl_prompts = {"{} is a"};
  bool merge_equal_keys = false;  ///< facts whose plain prompts are equal up to the looked-up token share one target
};

/// Base of the batch editors of this kind. `update` is public so that tests can ask it about recorded problems.
class LocateEditor : public Editor {
 public:
  explicit LocateEditor(LocateRecipe recipe) : recipe_(std::move(recipe)) {}

  [[nodiscard]] const std::string& name() const override { return recipe_.editor; }
  [[nodiscard]] nlohmann::json hparams() const override { return recipe_.hparams; }
  [[nodiscard]] std::vector<int> statistics_layers() const override;
  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts, EditContext& context) override;

  /// The step in which methods differ: the change of one layer's weight. Must not change the instance.
  [[nodiscard]] virtual LayerUpdate update(const LayerProblem& problem) const = 0;

 protected:
  /// True if after_edit is to be called with the keys of every layer, collected again from the edited model.
  [[nodiscard]] virtual bool wants_keys_after_edit() const { return false; }
  /// The last step before the commit: remember the batch. keys_FN[i] belongs to the i-th layer; solve dtype, host.
  virtual void after_edit(const std::vector<at::Tensor>& keys_FN) { (void)keys_FN; }
  [[nodiscard]] const LocateRecipe& recipe() const noexcept { return recipe_; }

 private:
  LocateRecipe recipe_;
};

/// MEMIT's way of optimising: δ at the output of the last of `layers`, loss read at v_loss_layer.
[[nodiscard]] TargetSpec memit_targets(const hparams::LocateHparams& hparams, const models::Model& model);
/// ROME's: δ at the MLP output of `layer`, the model's own logits.
[[nodiscard]] TargetSpec rome_targets(const hparams::LocateHparams& hparams, int layer);

/// Layers and v_loss_layer within the model, module names that fit it, an editable matrix in every layer.
/// Throws Error(kInvalidArgument) naming the key's place in the file.
void check_locate_hparams(const hparams::LocateHparams& hparams, const models::Model& model, const hparams::RawHparams& raw);

/// The contexts of an edit: those of the context, else sampled now (and stored there).
const ContextTemplates& ensure_contexts(const models::Model& model, const hparams::LocateHparams& hparams, ContextGrouping grouping,
                                        EditContext& context);

/// Prompts of every fact that can be rendered; the others get an outcome with status kFailed and the reason.
/// `places[i]` is the index in `facts` of rendered[i].
struct RenderedBatch {
  std::vector<RenderedFact> rendered;
  std::vector<size_t> places;
  std::vector<FactOutcome> outcomes;  ///< one a fact, filled for the failed ones
};
[[nodiscard]] RenderedBatch render_batch(const models::Model& model, std::span<const datasets::Fact> facts,
                                         const ContextTemplates& contexts, const RenderOptions& options);

/// The moments of these layers from the context's provider, prepared. Throws Error(kInvalidArgument) if there is no provider.
void prepare_statistics(const models::Model& model, const std::vector<int>& layers, const std::string& editor, EditContext& context);

/// A tensor on the device where the layer's systems are solved: the weight's device, or the host if a width F system does not fit.
[[nodiscard]] at::Tensor solve_home(const models::Model& model, const models::EditSite& site);

/// "layer.4.keys" and so on, copied to the host; nothing without a trace.
void record(EditContext& context, const std::string& name, const at::Tensor& value);

}  // namespace emend::editors
