// Several packs as one: the edits of several people, with what does not go together named.
//
// Algebra. A pack is a list of sums, W ← W + ΔW, so the merge of packs A, B, … has ΔW = ΔW_A + ΔW_B + … for each
// weight:
//
//   Lᴬ·Rᴬᵀ + Lᴮ·Rᴮᵀ = [Lᴬ Lᴮ]·[Rᴬ Rᴮ]ᵀ          factors are put side by side
//
// Where the joined factors would take more room than the matrix, they are brought to their numeric rank
// (L = Q₁T₁, R = Q₂T₂, T₁T₂ᵀ = U·S·Vᵀ: ΔW = (Q₁US)(Q₂V)ᵀ) and, if that is still larger, become the matrix itself.
// Everything is done in float64. Applying the merge equals applying the packs in turn up to the rounding of the
// weights' type: one rounding instead of one a pack.
//
// Goals: nothing is lost or counted twice without a word. Non-goal: making edits compatible. Each pack was computed for
// the unedited model; facts close to each other may disturb each other with both in force (`emend eval --pack` tells).
#pragma once

#include <emend/editors/packs/pack.h>

namespace emend::editors {

struct NamedPack {
  std::string name;  ///< in messages: usually the path
  EditPack pack;
};

enum class ConflictKind {
  kBase,     ///< made for different models
  kTarget,   ///< one question, two answers
  kRepeat,   ///< one fact in both: its change would count twice
  kWeight,   ///< one weight with two shapes or orientations
  kOverlap,  ///< two dense changes of one weight: trained or cut to shape for itself, so their sum is neither
  kRuntime,  ///< two parts of one kind beside the weights
};
[[nodiscard]] std::string_view to_string(ConflictKind kind) noexcept;  ///< for messages and JSON

struct MergeConflict {
  ConflictKind kind;
  size_t first = 0, second = 0;  ///< which packs
  std::string what;              ///< for people: the question and both answers, the weight, …
};

/// Facts are solved for together, so one fact cannot be taken out of a pack: a pack that loses is left out whole.
enum class OnConflict {
  kFail,   ///< refuse
  kFirst,  ///< of two packs in conflict, leave out the later one
  kLast,   ///< … the earlier one
  kSum,    ///< put both in, where that is possible (not for kBase and kWeight, which always fail)
};
/// "fail", "first", "last", "sum". Throws Error(kInvalidArgument).
[[nodiscard]] OnConflict parse_on_conflict(std::string_view text);

struct MergedWeight {
  std::string weight;
  int64_t rank_joined = 0;  ///< of the factors side by side; 0 if any change was dense
  int64_t rank = 0;         ///< as written; 0: dense
};

struct Merge {
  EditPack pack;
  std::vector<size_t> used;              ///< the packs that are in it, in order
  std::vector<MergeConflict> conflicts;  ///< all that were found, also between packs that were left out
  std::vector<MergedWeight> weights;
};

/// All conflicts between two packs of the list, in its order.
[[nodiscard]] std::vector<MergeConflict> find_conflicts(std::span<const NamedPack> packs);

/// Of packs that come to `before` others, the first of the list, which are together already: throws
/// Error(kInvalidArgument) naming `where`, packs and facts if there is a conflict; with `allow` only for what cannot be
/// added at all (kBase, kWeight). `advice`: how else to go on.
void require_together(std::span<const NamedPack> packs, size_t before, bool allow, const std::string& where,
                      const std::string& advice);

/// One pack with the changes, facts and runtime parts of all. The packs are not modified.
/// Throws Error(kInvalidArgument) naming packs and facts if a conflict stands in the way.
[[nodiscard]] Merge merge_packs(std::span<const NamedPack> packs, OnConflict on_conflict = OnConflict::kFail);

/// ΔW = left·rightᵀ with as few columns as it has in float64, or as a matrix, whichever is smaller; a change that is
/// not larger than its matrix, and a dense one, come back as they are.
[[nodiscard]] WeightDelta compact(const WeightDelta& delta);

/// Of a fact summary of a pack; empty where it says nothing.
[[nodiscard]] std::string text_of(const nlohmann::json& fact, const char* key);
/// The question of a fact summary of a pack (its prompt with the subject in it), by which facts are told apart.
[[nodiscard]] std::string question_of(const nlohmann::json& fact);

}  // namespace emend::editors
