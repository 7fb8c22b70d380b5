// What all locate-then-edit methods do around the one step in which they differ.
//
// An editor derives from LocateEditor, fills a LocateRecipe and writes update(). Steps of edit(): contexts → prompts →
// targets → for each layer: keys and current values with the model as it is now → residual → update() → apply_delta.
#pragma once

#include <emend/editors/apply.h>
#include <emend/editors/editor.h>
#include <emend/editors/keys.h>
#include <emend/editors/original_weights.h>
#include <emend/editors/solver.h>
#include <emend/editors/targets.h>
#include <emend/editors/windows.h>
#include <emend/hparams/locate.h>

#include <limits>
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
  size_t index = 0, count = 1;  ///< i-th of L layers
  models::EditSite site;
  at::Tensor weight_DF;    ///< the weight as it is now: a view, not to be written; weight's dtype and device
  at::Tensor keys_FN;      ///< averaged keys
  at::Tensor residual_DN;  ///< this layer's share of (targets − current values)
  SecondMoment moment;     ///< absent if the recipe needs none
  at::ScalarType dtype = at::kDouble;
};

/// The editor's answer: the delta, and how it was solved.
struct LayerUpdate {
  WeightDelta delta;
  SolveReport solve;
  std::map<std::string, at::Tensor> more = {};  ///< further tensors for a trace, by name
};

/// What a system keeps of a layer: λ·C + ridge·I, or (λ + ridge)·I where C is left out (`mom2_adjustment: false`).
[[nodiscard]] Preserved preserved_of(const LayerProblem& problem, double lambda, double ridge = 0);

/// MEMIT's closed form: ΔW = R·Kᵀ(preserved + K·Kᵀ)⁻¹ as two factors.
[[nodiscard]] LayerUpdate closed_form(const LayerProblem& problem, const Preserved& preserved);

/// How often a batch goes through the layers, and which facts each time.
struct Passes {
  int64_t count = 1;
  /// Facts with a residual ‖target − current‖ outside (above, below) sit a pass out; without limits all take part.
  /// Those at or above `below` in the first pass fail.
  double above = -1;
  double below = std::numeric_limits<double>::infinity();
};

/// How often a batch is optimised and written. The later rounds are for the facts whose target is still less probable
/// than `probability` after the plain prompt; they begin from the model as the earlier rounds left it. Not together
/// with windows, nor for editors that settle.
struct Rounds {
  int64_t count = 1;
  double probability = 0.1;
};

struct LocateRecipe {
  std::string editor;
  nlohmann::json hparams;  ///< effective values, for the record
  hparams::LocateHparams common;
  TargetSpec targets;  ///< memit_targets, rome_targets, or built by hand
  ContextGrouping grouping = ContextGrouping::kPlainApart;
  KeyWeighting weighting = KeyWeighting::kByGroup;
  ResidualSpread spread = ResidualSpread::kEqual;
  bool needs_statistics = true;
  std::vector<std::string> kl_prompts = {"{} is a"};
  bool merge_equal_keys = false;  ///< facts whose plain prompts are equal up to the looked-up token share one target
  Passes passes;
  Rounds rounds;
  TargetWindows windows;  ///< long targets window by window; not together with merge_equal_keys
};

/// Base of the batch editors of this kind. `update` is public so that tests can ask it about recorded problems.
class LocateEditor : public Editor {
 public:
  explicit LocateEditor(LocateRecipe recipe) : recipe_(std::move(recipe)) {}

  [[nodiscard]] const std::string& name() const override { return recipe_.editor; }
  [[nodiscard]] nlohmann::json hparams() const override { return recipe_.hparams; }
  [[nodiscard]] std::vector<int> statistics_layers() const override;
  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                EditContext& context) override;

  /// The step in which methods differ: the change of one layer's weight. Must not change the instance.
  [[nodiscard]] virtual LayerUpdate update(const LayerProblem& problem) const = 0;

  /// True if what is written in the end is not what update() solved for. Then the layers are solved with the solved
  /// changes written below them, all weights are put back, and what settle() makes of each change is written.
  [[nodiscard]] virtual bool settles() const { return false; }
  /// weight_DF: the weight before this batch, a view in paper orientation.
  [[nodiscard]] virtual WeightDelta settle(const models::EditSite& site, const WeightDelta& solved,
                                           const at::Tensor& weight_DF) const {
    (void)site, (void)weight_DF;
    return solved;
  }
  /// Weights that the model is to have while targets are optimised; null: those it has.
  [[nodiscard]] virtual const OriginalWeights* target_weights() const { return nullptr; }

 protected:
  /// True if after_edit is to be called with the keys of every layer, collected again from the edited model.
  [[nodiscard]] virtual bool wants_keys_after_edit() const { return false; }
  /// The last step before the commit: remember the batch. keys_FN[i] belongs to the i-th layer; solve dtype, host.
  virtual void after_edit(const std::vector<at::Tensor>& keys_FN) { (void)keys_FN; }
  [[nodiscard]] const LocateRecipe& recipe() const noexcept { return recipe_; }

 private:
  LocateRecipe recipe_;
};

/// MEMIT's way of optimising: δ at the output of the last of `layers`, loss read at v_loss_layer. In families with a
/// norm behind the rewritten matrix δ stands at the matrix's output, where it can be written (post_norm.h).
[[nodiscard]] TargetSpec memit_targets(const hparams::LocateHparams& hparams, const models::Model& model);
/// ROME's: δ at the MLP output of `layer`, the model's own logits.
[[nodiscard]] TargetSpec rome_targets(const hparams::LocateHparams& hparams, int layer);

/// What MEMIT and most of its descendants have in common: the hyper-parameters checked against the model, MEMIT's
/// targets, no statistics where `mom2_adjustment` is false. `values` are the effective ones, for the record. Throws
/// like check_locate_hparams.
[[nodiscard]] LocateRecipe memit_recipe(std::string editor, nlohmann::json values,
                                        const hparams::LocateHparams& hparams, const models::Model& model,
                                        const hparams::RawHparams& raw);

/// Layers and v_loss_layer within the model, module names that fit it, an editable matrix in every layer.
/// Throws Error(kInvalidArgument) naming the key's place in the file.
void check_locate_hparams(const hparams::LocateHparams& hparams, const models::Model& model,
                          const hparams::RawHparams& raw);

/// The contexts of an edit: those of the context, else sampled now (and stored there).
const ContextTemplates& ensure_contexts(const models::Model& model, const hparams::LocateHparams& hparams,
                                        ContextGrouping grouping, EditContext& context);

/// Prompts of every fact that can be rendered; the others get an outcome with status kFailed and the reason.
/// `places[i]` is the index in `facts` of rendered[i].
struct RenderedBatch {
  std::vector<RenderedFact> rendered;
  std::vector<size_t> places;
  std::vector<FactOutcome> outcomes;  ///< one a fact, filled for the failed ones
};
[[nodiscard]] RenderedBatch render_batch(const models::Model& model, std::span<const datasets::Fact> facts,
                                         const ContextTemplates& contexts, const RenderOptions& options);

/// The moments of these layers from the context's provider, prepared. Throws Error(kInvalidArgument) if there is no
/// provider.
void prepare_statistics(const models::Model& model, const std::vector<int>& layers, const std::string& editor,
                        EditContext& context);

/// A tensor on the device where the layer's systems are solved: the weight's device, or the host if a width F system
/// does not fit.
[[nodiscard]] at::Tensor solve_home(const models::Model& model, const models::EditSite& site);

/// "layer.4.keys" and so on, copied to the host; nothing without a trace.
void record(EditContext& context, const std::string& name, const at::Tensor& value);

}  // namespace emend::editors
