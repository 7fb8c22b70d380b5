// The edits of a model folder: a log of packs beside the weights, from which any of them can be taken out again.
//
// <model>/.emend/ holds the original bytes of every weight that a pack has touched, the packs, and which of them are in
// force, in which order. The weights in the model's files are always recomputed from originals and packs, so what they
// are depends on that list alone: not on the order in which edits were applied and reverted. With no pack in force the
// files have their original bytes.
//
// Whole or not at all: a change is written beside what it replaces, then announced, then moved into place by renames. A
// process that dies before the announcement leaves everything as it was; what one that dies after it left to do is done
// the next time the ledger is opened.
#pragma once

#include <emend/core/atomic_file.h>
#include <emend/core/log.h>
#include <emend/editors/packs/merge.h>

#include <set>

namespace emend::editors {

/// One pack in a ledger.
struct LedgerEntry {
  std::string id;       ///< first 12 hexadecimal digits of the pack's checksum: equal packs have equal ids
  bool active = false;  ///< in force
  std::string editor;
  int64_t facts = 0;
  std::vector<std::string> subjects;  ///< the first few, for lists
  std::vector<std::string> weights;
  std::string applied_at;  ///< time of the last change, UTC
  bool runtime = false;    ///< has parts beside the weights
  double survived = 1;     ///< share of the change that was left after rounding to the files' types (ApplyReport)
  std::vector<std::string> under;  ///< ids of the edits that were in force when it was made

  /// Whether rounding to the files' types took nothing worth a word.
  [[nodiscard]] bool whole() const { return survived >= 0.9999; }
};

/// Whether an edit in force in a model folder has parts beside the weights; false for anything that has no ledger.
/// Reads the list alone: takes no lock, finishes no change. Throws Error(kCorruption) for a damaged ledger.
[[nodiscard]] bool has_runtime_edits(const std::filesystem::path& model_folder);
/// What the weights of a model folder are made of; empty for anything that has no ledger. Reads and throws as above.
[[nodiscard]] Lineage lineage_of(const std::filesystem::path& model_folder);
/// The packs in force, as packs for the base. Throws also what load_pack throws, and Error(kCorruption) for a pack file
/// that is not the one that was applied.
[[nodiscard]] std::vector<NamedPack> packs_in_force(const std::filesystem::path& model_folder);
/// What a copy of the weights can say of itself: describe_edit() of the packs in force that changed weights. `left_out`
/// gets a sentence for each that lies beside them.
[[nodiscard]] std::vector<std::string> edits_in_weights(const std::filesystem::path& model_folder,
                                                        std::vector<std::string>& left_out);
/// What an edited GGUF file says of its edits, as packs without a change; empty for anything else. Throws
/// Error(kCorruption) where it says what emend does not write.
[[nodiscard]] std::vector<NamedPack> described_edits(const std::filesystem::path& gguf);
/// The edits in a model's weights: packs_in_force of a folder, described_edits of a GGUF file.
[[nodiscard]] std::vector<NamedPack> edits_of(const std::filesystem::path& model);

class Ledger {
 public:
  /// Opens the ledger of a Hugging Face folder, or prepares an empty one (nothing is written before the first pack).
  /// Finishes a change that was interrupted, where the folder can be written. Holds a lock from then or from the first
  /// change on until destroyed. Changes throw Error(kInvalidArgument) if another process holds it, and for a model in
  /// the shared Hugging Face cache; Error(kIo), with nothing changed, for a full disk or a folder that is read-only;
  /// Error(kCorruption) if another program has changed the weights, or parts of the ledger are missing.
  /// Throws Error(kInvalidArgument) if another process holds the lock, Error(kCorruption) if it is damaged, Error(kIo).
  explicit Ledger(std::filesystem::path model_folder, const Log& log = {});
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  /// All packs, those in force first and in their order.
  [[nodiscard]] std::vector<LedgerEntry> entries() const;
  /// Fingerprint of the folder without any pack.
  [[nodiscard]] const std::string& base_fingerprint() const noexcept { return base_; }

  /// Adds packs and puts them in force, last and in this order: all of them or, if one is refused, none. Returns their
  /// ids. Throws Error(kInvalidArgument) if a pack is for another model (require_base), in conflict with one in force
  /// or with another (require_together), or does not fit.
  std::vector<std::string> apply(const std::vector<std::filesystem::path>& packs, const ApplyPackOptions& options = {});
  /// Takes packs out of force (by id, a unique beginning of it, or the path of the pack file), all of them or none.
  /// Throws Error(kNotFound) listing the ids, Error(kInvalidArgument) if one is not in force, or if two of those that
  /// stay would then write the same neurons (a pack that names no others cannot be moved).
  void revert(const std::vector<std::string>& ids_or_paths);
  /// Takes all packs out of force, whatever their weights are now. Warns if the folder's fingerprint is not
  /// base_fingerprint() then: another program has changed something else.
  void revert_all();
  /// Puts the packs in force in another order. Deltas are sums, so the order changes rounding at most; packs that hold
  /// whole weights instead of sums would be refused, and an order is in which two write the same neurons.
  void reorder(const std::vector<std::string>& ids);

 private:
  void open();
  void lock();
  void begin_change();
  void remove_unknown() const;
  void require_as_left() const;
  void require_apart(const std::vector<std::string>& order) const;
  void warn_of_missing(const std::vector<std::string>& active) const;
  [[nodiscard]] std::string resolve(const std::string& id_or_path) const;
  [[nodiscard]] LedgerEntry examine(const EditPack& pack) const;
  void stamp_and_change(const std::vector<std::string>& active);
  void change(const std::vector<std::string>& active, const std::map<std::string, LedgerEntry>& known);
  void keep_originals(const std::set<std::string>& weights);
  [[nodiscard]] std::map<std::filesystem::path, std::map<std::string, at::Tensor>> rebuilt(
      const std::vector<std::string>& active, const std::set<std::string>& weights) const;

  std::filesystem::path folder_, ledger_;
  std::string base_;
  std::vector<std::string> active_;
  std::map<std::string, LedgerEntry> known_;
  std::vector<std::string> forms_;
  Log log_;
  Descriptor lock_;
};

/// Copies a model folder and its ledger into a new one; nothing is shared. Throws Error(kIo), and
/// Error(kInvalidArgument) for links that lead out of the folder.
void copy_model_folder(const std::filesystem::path& from, const std::filesystem::path& to);

/// A model folder with edits at `to`, which must be new or empty (unless `replace`: then an older model there goes) and
/// appears whole or not at all: `write` makes the folder (copy_model_folder, models::save_model), `change` its edits.
/// Throws what they throw, and Error(kIo). What is wrong with what a copy was made of is said of that: `from`.
void write_edited_folder(const std::filesystem::path& to,
                         const std::function<void(const std::filesystem::path&)>& write,
                         const std::function<void(Ledger&)>& change, bool replace, const Log& log,
                         const std::filesystem::path& from = {});

}  // namespace emend::editors
