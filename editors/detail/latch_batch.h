// One batch of LATCH: targets, gates and the neurons they are written into (methods/latch.cpp says what the method is).
#pragma once

#include <emend/editors/steps/contexts.h>
#include <emend/editors/steps/locate.h>
#include <emend/editors/steps/neurons.h>

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace emend::editors::detail {

struct LatchHparams : hparams::LocateHparams {
  int64_t text_tokens = 8192, crowd = 128, crowd_tokens = 32768, lead_ins = 3, gate_lead_ins = 10, wordings = 3,
          lookalikes = 12, asides = 0, sketch_steps = 6, release_tokens = 16, release_steps = 8, rounds = 2;
  std::vector<int64_t> release_layers;
  double talk = 0.5, text_weight = 1, lookalike_weight = 0.3, chat_weight = 0, mention_weight = 0.2, gain = 24,
         shut = 0.1, open = 0.4, room = 1.0 / 32;

  [[nodiscard]] std::vector<int64_t> all_layers() const {
    std::vector<int64_t> all = layers;
    all.insert(all.end(), release_layers.begin(), release_layers.end());
    return all;
  }
};

/// A subject's gate is the difference of two neurons.
inline constexpr size_t kNeuronsASubject = 2, kNeuronsARelease = 1;

/// What an instance remembers of one layer.
struct LayerMemory {
  std::set<int64_t> used;  // neurons
  // [D] what entered the MLP at the subjects' (or answers') last tokens and at the ends of prompts, float32, host
  std::vector<at::Tensor> seen;
  std::vector<int64_t> whose;  // a number for each of these
  std::vector<int64_t> spare;  // neurons that the last batch would have taken next
};

/// What the editor lends to a batch.
struct LatchTexts {
  const std::vector<std::vector<int64_t>>& rows;  ///< the text's tokens
  /// What the layers at these places of all_layers() do on it; the model, or a copy of it, is run where it is not
  /// known.
  std::function<const std::map<size_t, TextPass>&(const std::vector<size_t>& places, const models::Model& reader)>
      passes;
  std::vector<std::string> leads;  ///< pieces of it behind which gates learn to open, with {} for the prompt
  const ContextTemplates& contexts;
};

/// Edits the model; `memory` (one a layer of all_layers()) and `result` are added to. Behind the `fresh` first of
/// `facts`, which have outcomes, are those of earlier batches about the same subjects, which shall still hold. Nothing
/// is changed if it throws.
void edit_latch_batch(const LatchHparams& hparams, std::vector<LayerMemory>& memory, const LatchTexts& texts,
                      models::Model& model, std::span<const datasets::Fact> facts, size_t fresh,
                      const EditContext& context, EditResult& result);

}  // namespace emend::editors::detail
