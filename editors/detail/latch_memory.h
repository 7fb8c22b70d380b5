// What LATCH remembers of earlier batches (methods/latch.cpp), and of earlier runs.
#pragma once

#include <emend/editors/detail/latch_batch.h>

#include <array>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace emend::editors::detail {

using KeptFact = std::array<std::string, 3>;  ///< subject, prompt, answer

struct LatchMemory {
  std::vector<LayerMemory> layers = {};  ///< one a layer of all_layers()
  std::vector<KeptFact> facts = {};      ///< that were written, the last ones last

  [[nodiscard]] bool empty() const { return facts.empty() && layers.front().whose.empty(); }
  /// A fact with the same subject and prompt goes.
  void add(KeptFact fact);
};

/// By which memory knows that a subject has come again.
[[nodiscard]] int64_t subject_number(const std::string& subject);

/// What later batches shall know of a stage.
struct Written {
  std::pair<size_t, size_t> places = {};  ///< of layers, half open: `layers`, then `release_layers`
  std::vector<PromptRow> plain = {};      ///< read where a gate opens, and at the ends of prompts
  std::vector<int64_t> whose = {};        ///< subject_number of each
};
/// Later batches keep their gates shut at what enters the stage's MLPs there. Throws Error(kCancelled).
void remember(const LatchHparams& hparams, const Written& written, const models::Model& model,
              const EditContext& context, std::vector<LayerMemory>& memory);

/// Batches to come take none of these neurons, given by the name of W_down.
void take(std::vector<LayerMemory>& memory, const LatchHparams& hparams, const models::Model& model,
          const std::map<std::string, std::vector<int64_t>>& neurons);

/// What the edits in force in the model's folder, or those that its GGUF file tells of, have written, by whatever
/// editor: their facts, what enters the MLPs at them in the model as it is, and the neurons that they took. Throws what
/// packs_in_force and described_edits throw.
[[nodiscard]] LatchMemory memory_of_edits(const LatchHparams& hparams, const models::Model& model,
                                          const EditContext& context);

}  // namespace emend::editors::detail
