// The edits of a model folder: a log of packs beside the weights, from which any of them can be taken out again.
//
// <model>/.emend/ holds the original bytes of every weight that a pack has touched, the packs, and which of them are in
// force, in which order. The weights in the model's files are always recomputed from originals and packs, so what they
// are depends on that list alone: not on the order in which edits were applied and reverted. With no pack in force the
// files have their original bytes.
//
// A change is announced in a file before any weight is written and finished the next time the ledger is opened if the
// process died in between.
#pragma once

#include <emend/core/log.h>
#include <emend/editors/packs/pack.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

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
};

/// The packs in force in a model folder that have parts beside the weights, in their order; empty for anything that is
/// not a folder with a ledger. Reads only: takes no lock, finishes no change.
/// Throws Error(kCorruption) for a damaged ledger.
[[nodiscard]] std::vector<std::filesystem::path> active_runtime_packs(const std::filesystem::path& model_folder);

class Ledger {
 public:
  /// Opens the ledger of a Hugging Face folder, or prepares an empty one (nothing is written before the first pack).
  /// Finishes a change that was interrupted. Holds a lock until destroyed.
  /// Throws Error(kInvalidArgument) if another process holds it, Error(kCorruption) if it is damaged, Error(kIo).
  explicit Ledger(std::filesystem::path model_folder, const Log& log = {});
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  /// All packs, those in force first and in their order.
  [[nodiscard]] std::vector<LedgerEntry> entries() const;
  /// Fingerprint of the folder without any pack.
  [[nodiscard]] const std::string& base_fingerprint() const noexcept { return base_; }

  /// The ledger's own copy of a pack, by its whole id.
  [[nodiscard]] std::filesystem::path pack_path(const std::string& id) const;

  /// Adds a pack and puts it in force, last. Returns its id.
  /// options.accepted_bases: fingerprints besides base_fingerprint() that the pack may name (a GGUF file this folder
  /// was made from). Throws Error(kInvalidArgument) if the pack is for another model or already in force, or does not
  /// fit.
  std::string apply(const std::filesystem::path& pack, const ApplyPackOptions& options = {});
  /// Takes one pack out of force (by id, a unique beginning of it, or the path of the pack file).
  /// Throws Error(kNotFound) listing the ids, Error(kInvalidArgument) if it is not in force.
  std::string revert(const std::string& id_or_path);
  /// Takes all packs out of force. The folder's fingerprint is then base_fingerprint(), which is checked.
  void revert_all();
  /// Puts the packs in force in another order. Deltas are sums, so the order changes rounding at most; packs that hold
  /// whole weights instead of sums would be refused.
  void reorder(const std::vector<std::string>& ids);

  /// Copies a model folder without its ledger; weight files are hard-linked where the file system allows it, which is
  /// safe because a changed file is written anew. Throws Error(kIo); Error(kInvalidArgument) if `to` exists and is not
  /// empty.
  static void copy_model_folder(const std::filesystem::path& from, const std::filesystem::path& to);

 private:
  void lock();
  void open();
  [[nodiscard]] std::string resolve(const std::string& id_or_path) const;
  void change(const std::vector<std::string>& active);
  void rebuild(const std::vector<std::string>& active, const std::vector<std::string>& weights);
  void keep_originals(const std::vector<std::string>& weights);
  void write_state() const;

  std::filesystem::path folder_, ledger_;
  std::string base_;
  std::vector<std::string> active_;
  std::map<std::string, LedgerEntry> known_;
  Log log_;
  int lock_ = -1;
};

}  // namespace emend::editors
