// Packs that write whole neurons (LATCH), made apart for one model: each takes those that the model misses least, and
// so the same ones. Added up, neither pack would say anything; a neuron's place does not matter, so the later pack's
// move.
//
//   moved from j to k:   ΔW[k] = ΔW[j] + W[j] − W[k],  ΔW[j] = 0      rows of W_gate and W_up, columns of W_down
#pragma once

#include <emend/editors/packs/merge.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace emend::models {
class Checkpoint;
}

namespace emend::editors {

/// In EditPack::extra: {"layer": [places]}, the neurons that the editor would have taken next.
inline constexpr const char* kNeuronsToSpare = "neurons_to_spare";

/// Columns that a change has written; none where it has changed them all, since no neuron is one edit's then.
[[nodiscard]] std::vector<int64_t> taken_neurons(const WeightDelta& delta);
/// By weight, where there are any; of an edit that is known by its description, what that names.
[[nodiscard]] std::map<std::string, std::vector<int64_t>> neurons_of(const EditPack& pack);

/// In words, for each weight of which both write the same neurons.
[[nodiscard]] std::vector<std::string> neurons_of_both(const EditPack& first, const EditPack& second);

/// Whether both name one weight: a folder may carry or lack the family's base prefix.
[[nodiscard]] bool same_weight(const std::string& a, const std::string& b);

/// A weight without any edit, as it is stored; undefined for a name that is not known.
using OriginalWeight = std::function<at::Tensor(const std::string& name)>;
/// Those that a ledger keeps. Throws Error(kCorruption) where the file is missing or damaged, once one is wanted.
[[nodiscard]] OriginalWeight originals_in(const std::filesystem::path& file);
/// Those of a model: of a folder with edits in force, what its ledger keeps. The checkpoint must outlive it. Throws
/// what Checkpoint::read throws.
[[nodiscard]] OriginalWeight originals_of(const models::Checkpoint& checkpoint);

/// Moves the neurons of each pack that an earlier one has taken, or is described to have taken, to the first free ones
/// of those that its kNeuronsToSpare names. Where a pack stands depends on the packs before it alone. A pack that names
/// none, or too few, stays as it is: neurons_of_both tells.
void move_apart(std::span<NamedPack> packs, const OriginalWeight& original);

}  // namespace emend::editors
