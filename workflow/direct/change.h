// Directions in the weights: taken out of what layers write, or added to it for good.
#pragma once

#include <emend/editors/packs/pack.h>
#include <emend/workflow/direct/directions.h>

#include <span>
#include <string>
#include <vector>

namespace emend::workflow {

struct DirectChangeOptions {
  double strength = 1;
  models::LayerRange layers = {};  ///< whose weights change
  int from_layer = -1;             ///< take this layer's direction everywhere; -1: each layer its own
  bool preserve_norm = false;      ///< ablate: every column of a matrix keeps its length
  /// bake: texts whose tokens give the keys, one text an entry.
  std::vector<std::vector<int64_t>> texts = {};
};

/// What happened to one weight.
struct DirectFigures {
  int layer = 0;
  std::string weight;
  double relative_norm = 0;  ///< ‖ΔW‖/‖W‖
  /// ablate: ‖QᵀW'‖/‖W'‖ of the weight as written, for strength 1 zero up to rounding. bake: standard deviation over
  /// the texts' tokens of the share of the direction that each of them gets (the mean is 1); 0 for a bias.
  double left = 0;
};

/// A change that the model does not have yet.
struct DirectChange {
  editors::EditPack pack;
  std::vector<DirectFigures> figures;
};

/// W ← W − s·QQᵀW for every matrix that writes into the residual stream in the layers (attention output, MLP output,
/// all experts'), and the same for their biases; Q is an orthonormal basis of the directions there. Where a norm g
/// stands between matrix and stream (Gemma 2 and 3, GLM-4-0414), Q also holds g⊙d: its removal takes d out of the
/// stream. With preserve_norm each column is stretched back to its length; what is left of the directions stays zero,
/// but the change has full rank. Embeddings are not changed. The model's bytes are those from before when this returns.
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

}  // namespace emend::workflow
