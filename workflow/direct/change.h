// Directions in the weights: taken out of what layers write, or added to it for good.
#pragma once

#include <emend/editors/packs/pack.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/family.h>
#include <emend/workflow/direct/directions.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace emend::workflow {

/// Keys that several changes are fitted to.
struct DirectKeys;

/// Where a change acts if not everywhere, as options and packs say it.
constexpr const char* kAnswerStart = "answer-start";

struct DirectChangeOptions {
  double strength = 1;
  models::LayerRange layers = {};  ///< whose weights change
  int from_layer = -1;             ///< take this layer's direction everywhere; -1: each layer its own
  bool preserve_norm = false;      ///< ablate: every column of a matrix keeps its length
  /// Texts whose tokens give the keys, one text an entry: of bake, and of ablate where `spared` holds some.
  std::vector<std::vector<int64_t>> texts = {};
  /// Only the last token of each of `texts` counts, where an answer begins; `spared` then has to hold some.
  bool answer_start = false;
  /// Texts that stay as they are: the change is the least-squares one that does its work on the keys of `texts` and
  /// nothing on these. None: the change is the same for all texts.
  std::vector<std::vector<int64_t>> spared = {};
  double spare_weight = 10;  ///< of the mean square that is left on `spared`, beside that on `texts`
  /// bake: keys of the model as it is, not of the steered one, so that the change is right for all strengths. What is
  /// read for one change is kept for the next with the same texts.
  std::shared_ptr<DirectKeys> unchanged_keys = {};
};

/// None yet.
[[nodiscard]] std::shared_ptr<DirectKeys> make_direct_keys();

/// What happened to one weight.
struct DirectFigures {
  int layer = 0;
  std::string weight;
  models::Part part = models::Part::kDown;
  double relative_norm = 0;  ///< ‖ΔW‖/‖W‖
  /// ablate: ‖QᵀW'‖/‖W'‖ of the weight as written, for strength 1 zero up to rounding. bake: standard deviation over
  /// the texts' tokens of the share of the direction that each of them gets (the mean is 1); 0 for a bias.
  double left = 0;
  at::Tensor basis_DK = {};  ///< ablate: Q, float64 on the host
};

/// A change that the model does not have yet.
struct DirectChange {
  editors::EditPack pack;
  std::vector<DirectFigures> figures;  ///< of each of the pack's deltas, in their order
};

/// W ← W − s·QQᵀW for every matrix that writes into the residual stream in the layers (attention output, MLP output,
/// all experts'), and the same for their biases; Q is an orthonormal basis of the directions there. Where a norm g
/// stands between matrix and stream (Gemma 2 and 3, GLM-4-0414), Q also holds g⊙d: its removal takes d out of the
/// stream. With preserve_norm each column is stretched back to its length; what is left of the directions stays zero,
/// but the change has full rank. With `spared` the layer's keys k decide: qᵀW becomes small on those of `texts` alone.
/// Embeddings are not changed. The model's bytes are those from before when this returns.
/// Throws Error(kInvalidArgument) for directions that do not fit the model, an empty range, or another strength than 1
/// with preserve_norm.
[[nodiscard]] DirectChange ablate_directions(models::Model& model, std::span<const Directions> directions,
                                             const DirectChangeOptions& options, const Handles& lent = {});

/// The same as steering with s·d behind each layer of the range, as weights. Where the MLP's output has a bias, that
/// (exact). Elsewhere W ← W + s·d·uᵀ with the u for which uᵀk is nearest to 1 over the keys k of the texts' tokens in
/// the steered model (least squares with a small ridge), scaled so that it is 1 on average. Behind a norm of the branch
/// d is replaced by the mean change of the matrix's output that moves the stream by s·d. Throws Error(kUnsupported) for
/// a mixture of experts, and as ablate_directions.
[[nodiscard]] DirectChange bake_directions(models::Model& model, std::span<const Directions> directions,
                                           const DirectChangeOptions& options, const Handles& lent = {});

/// Whether "bake" or "ablate" without texts to spare would change biases in these layers.
[[nodiscard]] bool changes_biases(const models::Model& model, const std::string& way, models::LayerRange layers);
/// Before the work: throws Error(kUnsupported) if what `way` changes in these layers has no place in an adapter of this
/// form. `spares`: there are texts to spare.
void require_adapter(const std::string& form, const models::Model& model, const std::string& way,
                     models::LayerRange layers, bool spares);

/// Before the work: throws Error(kUnsupported) for a mixture of experts, which has no matrix that a direction is baked
/// into, nor one that all keys of a layer enter, by which texts are spared. `action` names what is to be done.
void require_one_mlp(const models::ModelConfig& config, const std::string& action, bool bakes, bool spares);

/// How many times its change a weight gets.
using Strengths = std::function<double(const DirectFigures&)>;
/// Another strength for each weight. Those that get none are left out.
[[nodiscard]] DirectChange scaled(const DirectChange& change, const Strengths& strengths);
/// Reads off what is `left` of ablated directions with the change in the model, whose bytes are those from before then.
void measure_left(models::Model& model, DirectChange& change);

/// While it lives, the model computes as if it had the change. No weight is written, except those of experts and those
/// whose change has full rank.
class TrialChange {
 public:
  TrialChange(models::Model& model, const DirectChange& change);
  ~TrialChange();

 private:
  hooks::HookSession session_;
  std::unique_ptr<editors::EditTransaction> written_;
};

}  // namespace emend::workflow
