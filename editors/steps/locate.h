// What all locate-then-edit methods do around the one step in which they differ.
//
// An editor is a LocateRecipe: settings, and as functions the steps in which it differs. Steps of an edit: contexts →
// prompts → targets → for each layer: keys and current values of the model as it is → residual → update → apply_delta.
#pragma once

#include <emend/editors/registry.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/key_cache.h>
#include <emend/editors/steps/keys.h>
#include <emend/editors/steps/modifiers.h>
#include <emend/editors/steps/solver.h>
#include <emend/editors/steps/targets.h>
#include <emend/hparams/locate.h>
#include <emend/models/products.h>

#include <limits>

namespace emend::editors {

/// How the residual is shared out over the layers still to come.
enum class ResidualSpread {
  kEqual,  ///< 1/(L−i), MEMIT
  kSqrt,   ///< 1/sqrt(L−i), PMET
  kNone,   ///< all of it in every layer
};

/// What a method's update sees of one layer. Matrices in paper orientation, in `dtype`, on the solve device.
struct LayerProblem {
  int layer = 0;
  size_t index = 0;  ///< i-th of L layers
  models::EditSite site;
  at::Tensor weight_DF;    ///< the weight as it is now: a view, not to be written; weight's dtype and device
  at::Tensor keys_FN;      ///< averaged keys
  at::Tensor residual_DN;  ///< this layer's share of (targets − current values)
  SecondMoment moment;     ///< absent where `mom2_adjustment` is false
  EarlierKeys earlier;     ///< of the batches before this one; nothing unless the recipe remembers keys
  at::Tensor original_DF;  ///< the weight before the first batch, float64; nothing unless the recipe keeps it
  at::Tensor carried;      ///< LayerUpdate::carries of this layer's last batch; nothing before the first
  at::ScalarType dtype = at::kDouble;
};

/// The method's answer: the delta, and how it was solved.
struct LayerUpdate {
  WeightDelta delta;
  SolveReport solve;
  std::map<std::string, at::Tensor> more = {};  ///< further tensors for a trace, by name
  at::Tensor carries = {};                      ///< what the next batch is to find in LayerProblem::carried
};

/// What a system keeps of a layer: λ·C + ridge·I, or (λ + ridge)·I where C is left out (`mom2_adjustment: false`).
[[nodiscard]] Preserved preserved_of(const LayerProblem& problem, double lambda, double ridge = 0);

/// MEMIT's closed form: ΔW = R·Kᵀ(preserved + KpKpᵀ + K·Kᵀ)⁻¹ as two factors, Kp the problem's earlier keys.
/// Where what these were to give is remembered too (Vp), the weight becomes the least-squares answer to all batches,
/// whatever it is now:  ΔW = (R·Kᵀ + VpKpᵀ − W·KpKpᵀ + (W0 − W)·preserved)(…)⁻¹, a dense change.
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
/// than `probability` after the plain prompt, on the model as it is then. Not together with windows or `settle`.
struct Rounds {
  int64_t count = 1;
  double probability = 0.1;
};

struct LocateRecipe {
  hparams::LocateHparams common = {};
  TargetSpec targets = {};  ///< memit_targets, rome_targets, or built by hand
  ResidualSpread spread = ResidualSpread::kEqual;
  bool merge_equal_keys = false;  ///< facts whose plain prompts are equal up to the looked-up token share one target
  Passes passes = {};
  Rounds rounds = {};
  TargetWindows windows = {};  ///< long targets window by window; not together with merge_equal_keys
  /// Given where targets hang on each other: in the place of optimise_targets. keys_FN: what each problem's key in the
  /// targets' layer is before anything is written, on the host, in the solve dtype. Not together with windows.
  std::function<std::vector<Target>(const models::Model& model, std::vector<TargetProblem> problems,
                                    const at::Tensor& keys_FN, const TargetSpec& spec, const EditContext& context)>
      optimise = {};

  /// The step in which methods differ: the change of one layer's weight. MEMIT's own is memit_update.
  std::function<LayerUpdate(const LayerProblem& problem)> update = {};
  /// Given where what is written in the end is not what `update` solved for. Then the layers are solved with the solved
  /// changes written below them, all weights are put back, and what `settle` makes of each change is written.
  /// weight_DF: the weight before this batch, a view in paper orientation.
  std::function<WeightDelta(const models::EditSite& site, const WeightDelta& solved, const at::Tensor& weight_DF)>
      settle = {};
  /// Given where the sum of all changes is corrected after the last batch: the correction of one layer, if it needs
  /// one. Both matrices in paper orientation, float64, on the host.
  std::function<std::optional<LayerUpdate>(const models::EditSite& site, const at::Tensor& original_DF,
                                           const at::Tensor& change_DF)>
      correct = {};
  /// The keys of every batch, taken again from the model as the batch has left it (as the published code does), are
  /// LayerProblem::earlier of the next ones.
  bool remembers_keys = false;
  bool keys_as_written = false;  ///< remembered are the keys that a batch was solved with instead
  /// What earlier batches asked for and the weights do not give is asked for again (closed_form). Needs both.
  bool compensates = false;
  bool values_as_given = false;  ///< earlier batches asked for no more than what the weights gave them (compensates)
  /// The targets' site is the first rewritten layer; those above get targets from a pass with its value in place.
  bool replays_forward = false;
  Modifiers modifiers = {};
  bool rewinds_targets = false;  ///< targets are optimised with the weights as they were before the first batch

  /// Whether anything here refers to the weights before the first batch.
  [[nodiscard]] bool keeps_originals() const {
    return rewinds_targets || correct || compensates || modifiers.revive > 0;
  }
};

/// What an editor keeps from batch to batch.
struct LocateMemory {
  KeyCache keys;
  /// The rewritten matrices before the first batch, by name, as they are stored, on the host; if the recipe keeps them.
  std::map<std::string, at::Tensor> originals;
  std::vector<at::Tensor> carried;  ///< LayerUpdate::carries, a layer each; undefined before the first batch
  std::vector<at::Tensor> shared;   ///< a layer each (names_share), undefined without `suit`
  double nas_norm = 0;              ///< of the first batch; 0: not known yet

  /// Gives a layer's problem, whose keys it has, what the recipe wants of it.
  void join(const LocateRecipe& recipe, LayerProblem& problem) const;
};

/// A method of this kind as an editor.
class LocateEditor final : public NamedEditor {
 public:
  LocateEditor(LocateRecipe recipe, const RecipeInputs& in)
      : NamedEditor(in), recipe_(std::move(recipe)), memory_(fresh_memory()) {}

  [[nodiscard]] std::vector<int> statistics_layers() const override;
  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                const EditContext& context) override;
  [[nodiscard]] std::optional<EditResult> finish(models::Model& model, const EditContext& context) override;
  [[nodiscard]] std::map<std::string, at::Tensor> state() const override;
  void load_state(const std::map<std::string, at::Tensor>& state) override;

  [[nodiscard]] const LocateRecipe& recipe() const noexcept { return recipe_; }
  /// The recipe's update with this editor's memory, so that recorded problems can be asked about.
  [[nodiscard]] LayerUpdate update(LayerProblem problem) const;

 private:
  [[nodiscard]] LocateMemory fresh_memory() const {
    const std::vector<at::Tensor> none(recipe_.common.layers.size());
    return {.keys = {}, .originals = {}, .carried = none, .shared = none};
  }

  LocateRecipe recipe_;
  LocateMemory memory_;
  std::optional<ContextTemplates> contexts_;  ///< sampled at the first edit
};

/// Entry of a locate-then-edit method in the table of editors; `recipe` throws like check_locate_hparams.
template <class H>
[[nodiscard]] EditorInfo locate_entry(
    std::string name, std::string summary, std::string paper, const hparams::Schema<H>& schema,
    std::type_identity_t<std::function<LocateRecipe(const H&, const RecipeInputs&)>> recipe) {
  return editor_entry(std::move(name), std::move(summary), std::move(paper), schema,
                      [recipe = std::move(recipe)](const H& h, const RecipeInputs& in) {
                        return std::make_unique<LocateEditor>(recipe(h, in), in);
                      });
}

/// How a batch is put together, whatever solves it.
struct SharedHparams : hparams::LocateHparams {
  bool merge_equal_keys = false;
  int64_t rounds = 1;
  double round_probability = 0.1;
  bool nas = false;  ///< what goes on top: modifiers.h
  double nas_norm = 0, revive = 0, simie = 0, suit = 0;
};
[[nodiscard]] const hparams::Schema<SharedHparams>& shared_hparams_schema();  ///< the fields above
/// A check of the schema for editors that write a batch only once: empty, or what is expected of `rounds`.
[[nodiscard]] std::string one_round(const SharedHparams& hparams);

struct MemitHparams : SharedHparams {  ///< what MEMIT and its descendants share
  double mom2_update_weight = 15000;
};
[[nodiscard]] const hparams::Schema<MemitHparams>& memit_hparams_schema();  ///< the fields above

/// The declaration of `history` in editors whose published form has none.
[[nodiscard]] hparams::FieldOptions history_field();

/// MEMIT's update: closed_form with λC + ridge·I preserved.
[[nodiscard]] std::function<LayerUpdate(const LayerProblem&)> memit_update(double lambda, double ridge = 0);

/// MEMIT's way of optimising: δ at the output of the last of `layers`, loss read at v_loss_layer. In families with a
/// norm behind the rewritten matrix δ stands at the matrix's output, where it can be written (post_norm.h).
[[nodiscard]] TargetSpec memit_targets(const hparams::LocateHparams& hparams, const models::Model& model);
/// ROME's: δ at the MLP output of `layer`, the model's own logits.
[[nodiscard]] TargetSpec rome_targets(const hparams::LocateHparams& hparams, int layer);

/// What locate-then-edit methods have in common: the hyper-parameters checked against the model, MEMIT's targets, no
/// statistics where `mom2_adjustment` is false. The caller adds the update. Throws like check_locate_hparams.
[[nodiscard]] LocateRecipe locate_recipe(const hparams::LocateHparams& hparams, const RecipeInputs& in);
/// The same with shared keys and rounds; for MEMIT's descendants with its update.
[[nodiscard]] LocateRecipe shared_recipe(const SharedHparams& hparams, const RecipeInputs& in);
[[nodiscard]] LocateRecipe memit_recipe(const MemitHparams& hparams, const RecipeInputs& in);

/// Layers and v_loss_layer within the model, module names that fit it, an editable matrix in every layer.
/// Throws Error(kInvalidArgument) naming the key's place in the file.
void check_locate_hparams(const hparams::LocateHparams& hparams, const models::Model& model,
                          const hparams::RawHparams& raw);

/// The contexts of an edit: those chosen, else what an earlier edit sampled (`kept`), else sampled now and kept there.
const ContextTemplates& ensure_contexts(const models::Model& model, const hparams::LocateHparams& hparams,
                                        ContextGrouping grouping, const EditContext& context,
                                        std::optional<ContextTemplates>& kept);

/// Prompts of every fact that can be rendered; the others get an outcome with status kFailed and the reason.
/// `places[i]` is the index in `facts` of rendered[i].
struct RenderedBatch {
  std::vector<RenderedFact> rendered;
  std::vector<size_t> places;
  std::vector<FactOutcome> outcomes;  ///< one a fact, filled for the failed ones
};
[[nodiscard]] RenderedBatch render_batch(const models::Model& model, std::span<const datasets::Fact> facts,
                                         const ContextTemplates& contexts, const RenderOptions& options);

/// What a batch of these methods begins with, noted in `result`: contexts, the moments of the layers that are rewritten
/// (unless `mom2_adjustment` is false), prompts. Throws Error(kInvalidArgument) where there is no provider of moments.
[[nodiscard]] RenderedBatch begin_batch(const models::Model& model, std::span<const datasets::Fact> facts,
                                        const hparams::LocateHparams& hparams, ContextGrouping grouping,
                                        const EditContext& context, std::optional<ContextTemplates>& kept,
                                        EditResult& result);

/// A tensor where the layer's systems are solved: on the weight's device, or the host if F×F does not fit.
[[nodiscard]] at::Tensor solve_home(const models::Model& model, const models::EditSite& site);

/// Ordinary text as rows of ids, of at least `tokens` tokens: that of the statistics, else what the model writes. Every
/// process gets the first one's.
[[nodiscard]] std::vector<std::vector<int64_t>> text_rows(const models::Model& model, int64_t tokens,
                                                          const EditContext& context, Rows kind = Rows::kText);

/// Adds the seconds of a scope to a phase, and in an edit the operations.
class PhaseTimer {
 public:
  PhaseTimer(std::map<std::string, double>& seconds, const char* phase) : seconds_(seconds[phase]) {}
  PhaseTimer(EditResult& result, const char* phase) : seconds_(result.seconds[phase]), flops_(&result.flops[phase]) {}
  ~PhaseTimer() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    if (flops_) *flops_ += models::linear_flops() - before_;
  }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  double& seconds_;
  int64_t* flops_ = nullptr;
  int64_t before_ = models::linear_flops();
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// A view of a site's weight in paper orientation.
[[nodiscard]] at::Tensor oriented(const models::Model& model, const models::EditSite& site);
/// A weight as it is stored, in paper orientation, float64, on the host.
[[nodiscard]] at::Tensor oriented_original(const models::EditSite& site, const at::Tensor& stored);

/// "layer.4.keys" and so on, copied to the host; nothing without a trace.
void record(const EditContext& context, const std::string& name, const at::Tensor& value);

}  // namespace emend::editors
