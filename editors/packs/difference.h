// What tells two edits, or two models, apart: facts and weights. (What they make the model say is the caller's to ask.)
#pragma once

#include <emend/editors/packs/pack.h>
#include <emend/models/checkpoint.h>

namespace emend::editors {

/// A fact that both have, with different answers.
struct ChangedFact {
  std::string question, a, b;
};
struct FactDifference {
  std::vector<nlohmann::json> only_a, only_b;  ///< fact summaries, as packs hold them
  std::vector<ChangedFact> changed;
  size_t same = 0;
};
/// Facts are told apart by their question (question_of in merge.h); of repeated ones the last counts.
[[nodiscard]] FactDifference compare_facts(const nlohmann::json& a, const nlohmann::json& b);

/// How far one weight was moved, and whether the two went the same way. Norms are Frobenius norms.
struct WeightDifference {
  std::string weight;
  std::optional<double> base;    ///< ‖W‖ of the unedited weight, where it is known
  double a = 0, b = 0;           ///< ‖ΔW_A‖, ‖ΔW_B‖
  double between = 0;            ///< ‖ΔW_B − ΔW_A‖
  std::optional<double> cosine;  ///< ⟨ΔW_A, ΔW_B⟩/(‖ΔW_A‖‖ΔW_B‖); none where one of them is zero
};
/// One entry for each weight that either changes, in the order of the lists. `base` gives the norms of the unedited
/// weights; may be null. Throws Error(kInvalidArgument) if the two change a weight with different shapes.
[[nodiscard]] std::vector<WeightDifference> compare_deltas(const std::vector<WeightDelta>& a,
                                                           const std::vector<WeightDelta>& b,
                                                           const models::Checkpoint* base);

/// What lies beside the weights, by its kind.
struct RuntimeDifference {
  std::string kind;
  bool in_a = false, in_b = false;
  bool same = false;  ///< to the bit
};
/// One entry for each kind that either has, in alphabetical order.
[[nodiscard]] std::vector<RuntimeDifference> compare_runtime(const std::vector<RuntimePart>& a,
                                                             const std::vector<RuntimePart>& b);

/// The changes of `edited` against `base`, tensor by tensor, those that are zero left out: what a pack of the edit
/// would hold, dense and in the stored orientation. Throws Error(kInvalidArgument) unless both have the same tensors.
[[nodiscard]] std::vector<WeightDelta> deltas_between(const models::Checkpoint& base, const models::Checkpoint& edited);

}  // namespace emend::editors
