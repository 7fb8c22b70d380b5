// Single neurons of an MLP: what they contribute to a text, which of them can be given away, and how one is written.
//
//   MLP(x) = W_down (act(W_gate x) ∘ W_up x)      without a gate: W_down act(W_up x)
//   D hidden width · F neurons · E neurons that are written · N tokens of text
#pragma once

#include <emend/editors/steps/apply.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace emend::editors {

/// The weights of one layer's neurons. Without a gate, `gate` is W_up and `up` has no name.
struct MlpWeights {
  models::EditSite gate, up, down;
  std::vector<std::string> biases;  ///< of gate and up; [F] or, where they are one matrix, [2F]
  bool fused = false;               ///< gate rows, then up rows in one matrix

  /// Throws Error(kUnsupported) where there is no single MLP (experts), as Model::edit_site does.
  [[nodiscard]] static MlpWeights of(const models::Model& model, int layer);
  [[nodiscard]] bool gated() const noexcept { return fused || !up.weight_name.empty(); }
};

/// What a layer's MLP does on a text.
struct TextPass {
  at::Tensor inputs_ND;  ///< what enters it, float32
  at::Tensor energy_F;   ///< mean square of the neurons' values, float64

  /// Runs the rows once, up to the last of these layers; each result lies where that layer's systems are solved. Throws
  /// Error(kCancelled).
  [[nodiscard]] static std::map<int, TextPass> of(const models::Model& model,
                                                  const std::vector<std::vector<int64_t>>& rows,
                                                  const std::vector<int>& layers, const EditContext& context);
};

/// `count` neurons that contribute least on the text (E[a²]·‖column of W_down‖²), without those of `used`. What hardly
/// ever moves (a thousandth of the median) is left alone: it may hold an earlier edit, or something else that is rare.
/// Throws Error(kInvalidArgument) if there are not as many.
[[nodiscard]] std::vector<int64_t> spare_neurons(const models::Model& model, const MlpWeights& weights,
                                                 const TextPass& pass, size_t count, const std::set<int64_t>& used);

/// Whole new rows and columns of neurons.
struct NewNeurons {
  std::vector<int64_t> places;
  at::Tensor gate_ED, up_ED;  ///< rows of W_gate and W_up; up_ED is not used where there is no gate
  at::Tensor down_DE;         ///< columns of W_down
};

/// Writes them, with biases of 0; one delta a weight is added to `deltas` and its figures to `layers`.
void write_neurons(const MlpWeights& weights, const NewNeurons& neurons, EditTransaction& transaction,
                   EditResult& result);

}  // namespace emend::editors
