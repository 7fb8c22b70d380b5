// The gates of one layer: what they learn from, and the neurons that they become (methods/latch.cpp).
//
//   D hidden width · P prompts at which gates learn · N tokens of text
#pragma once

#include <emend/editors/detail/latch_batch.h>
#include <emend/editors/steps/targets.h>

#include <span>
#include <string>
#include <vector>

namespace emend::editors::detail {

/// Facts about one subject, or one fact's answer: one target, one gate.
struct LatchUnit {
  std::string subject;
  std::vector<size_t> facts;  ///< of the rendered ones
  size_t layer = 0;           ///< place in all_layers()
  /// Prompts: those that open the gate, those behind a negation, those about similar names, other questions.
  size_t begin = 0, open = 0, denied = 0, aside = 0, end = 0;
  std::vector<std::string> asides;  ///< questions that are not those of its facts
  std::vector<bool> heeded;         ///< behind a negation: the unedited model says something else there
  Target target;
  std::vector<int64_t> neurons;  ///< once it is written
  double value = 0;              ///< LatchGate's
};

/// The neurons of the layers of all_layers(), as a batch takes them.
class LatchRoom {
 public:
  LatchRoom(const LatchHparams& hparams, const std::vector<LayerMemory>& memory, const models::Model& model);
  /// Takes `neurons` in one of the places [begin, end) and returns it: the first layer with so many vacant ones, then
  /// the first with room; if there is none, the one of which least is taken.
  [[nodiscard]] size_t take(size_t begin, size_t end, size_t neurons);

 private:
  struct Layer {
    size_t used, vacant;
    int64_t width;
  };
  double room_;
  std::vector<Layer> layers_;
};

/// What a layer's gates learn from.
struct LatchRows {
  const TextPass& text;
  const at::Tensor& prompts_PD;
  const LayerMemory& memory;  ///< of earlier batches
};

/// One unit's neurons.
struct LatchGate {
  std::vector<at::Tensor> opens_D, adds_D;  ///< rows of W_gate and columns of W_down, which are ±δ/value by turns
  double value = 0;                         ///< of the neurons together where the gate is open
  at::Tensor reads_D;                       ///< the row of W_up of all of them; undefined without a gate in the MLP
};

/// A gate for each unit of one layer, by cores side by side. A subject's is act(γ(g·x − shut)) − act(γ(g·x − open)):
/// nothing up to the one, the same from the other on. A release opens by degrees: act(γ g·x). Empty for a gate that
/// stays shut at its own prompts. Throws Error(kCancelled).
[[nodiscard]] std::vector<LatchGate> find_gates(const LatchHparams& hparams, const LatchTexts& texts,
                                                const models::Model& model, std::span<LatchUnit* const> units,
                                                const LatchRows& rows, const EditContext& context);

}  // namespace emend::editors::detail
