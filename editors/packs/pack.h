// Edit packs: the change alone, in one small file that says which model it belongs to.
#pragma once

#include <emend/core/safetensors.h>
#include <emend/editors/editor.h>
#include <emend/editors/steps/delta.h>
#include <emend/editors/steps/transaction.h>

#include <map>

namespace emend::editors {

/// The newest version. Packs without runtime parts are written as version 1.
inline constexpr int kPackVersion = 2;

/// What the weights of a model are made of.
struct Lineage {
  std::string base;                ///< fingerprint of the model without any edit; empty: no edit is known
  std::vector<std::string> edits;  ///< ids of the packs in force, in their order
  /// Fingerprints of other forms of `base` (a GGUF file that the folder was written from), for which packs were
  /// accepted.
  std::vector<std::string> forms = {};
};

struct EditPack {
  std::string id;                ///< of a pack that was read: the first 12 digits of its file's SHA-256
  std::string base_fingerprint;  ///< Model::fingerprint() of the model that the pack was made for
  Lineage under;                 ///< that model's, if it was an edited folder: what lies under this pack
  std::string editor;
  nlohmann::json hparams;            ///< effective values
  nlohmann::json facts;              ///< datasets::to_json of each
  nlohmann::json extra;              ///< seed, contexts, engine, statistics, emend version, …
  std::vector<WeightDelta> deltas;   ///< one a weight
  std::vector<RuntimePart> runtime;  ///< what lies beside the weights (runtime.h)
  /// Of a described_edit(): the neurons that its changes took, by weight (neurons_apart.h).
  std::map<std::string, std::vector<int64_t>> described_neurons;

  /// Fingerprint of the model without any edit.
  [[nodiscard]] const std::string& root() const noexcept { return under.base.empty() ? base_fingerprint : under.base; }
  /// Calls it one for another model, whose fingerprint without any edit is `base`; the edits under it stay.
  void rebase(const std::string& base) {
    base_fingerprint = base;
    if (!under.edits.empty()) under.base = base;
  }

  /// Of what lies beside the weights: "grace, wise".
  [[nodiscard]] std::string runtime_kinds() const;

  /// Of one or several results of the same run, in order.
  [[nodiscard]] static EditPack from_results(const models::Model& model, std::span<const EditResult> results,
                                             std::span<const datasets::Fact> facts);
};

/// Writes atomically. Changes are stored in float64, which keeps them exactly.
void save_pack(const std::filesystem::path& path, const EditPack& pack);
/// Throws Error(kCorruption) for anything that is not a whole, unaltered pack (checksum, shapes, ranks, names),
/// Error(kUnsupported) for a newer format version.
[[nodiscard]] EditPack load_pack(const std::filesystem::path& path);
/// EditPack::id of a file: equal packs have equal ids. Throws as read_file does.
[[nodiscard]] std::string pack_id(const std::filesystem::path& path);

/// Facts, editor, settings, seed and base of an edit as one line of JSON: for files that have room for no more.
[[nodiscard]] std::string describe_edit(const EditPack& pack);
/// The editor and the facts of such a line, as a pack without a change. Throws Error(kCorruption) naming `where`.
[[nodiscard]] EditPack described_edit(const std::string& line, const std::string& where);

struct ApplyPackOptions {
  bool force = false;  ///< apply although the model's fingerprint is another one (shapes must still fit)
  /// The caller attaches the pack's runtime parts (RuntimeScope). Without it a pack that has any is refused, so that
  /// half of an edit is never taken for all of it.
  bool runtime_apart = false;
  /// Fingerprints, or beginnings of at least 8 digits, that the pack may name besides the model's own: a model that is
  /// known to be the same in another form.
  std::vector<std::string> accepted_bases = {};
  bool allow_conflicts = false;  ///< of several packs: add what find_conflicts (merge.h) names, where that is possible
};

/// Throws Error(kInvalidArgument) naming `where` unless the pack was made for the model with `fingerprint`, for one
/// with the base of `here` and no other edits than those in force there, or for one of options.accepted_bases;
/// options.force accepts any. Where `here` has the pack's base, the edits under the pack have to be in force whatever
/// the fingerprint. Also if the pack is in force there itself.
void require_base(const EditPack& pack, const std::string& fingerprint, const ApplyPackOptions& options,
                  const std::string& where = "edit pack", const Lineage& here = {});

/// True if the file says that it is an edit pack; load_pack says whether it is a sound one.
[[nodiscard]] bool is_pack(const SafetensorsFile& file);

/// Throws Error(kInvalidArgument) naming `where` (if any) and the weight unless every change has its weight's shape.
void require_shapes(const models::Model& model, const EditPack& pack, const std::string& where = "");

/// Writes a pack's deltas into a model. The returned transaction holds the originals: restore() takes the pack out
/// again and gives every byte back; commit() makes it final. The model must outlive the transaction. Throws
/// Error(kInvalidArgument), with nothing written, if the model is not the pack's base or a weight does not fit.
[[nodiscard]] std::unique_ptr<EditTransaction> apply_pack(models::Model& model, const EditPack& pack,
                                                          const ApplyPackOptions& options = {});

}  // namespace emend::editors
