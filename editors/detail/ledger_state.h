// What lies in the ledger of a model folder: ledger.json and the packs that were applied.
#pragma once

#include <emend/editors/packs/ledger.h>

namespace emend::editors::detail {

constexpr const char *kFolder = ".emend", *kState = "ledger.json";

struct StoredState {
  std::string base;                 ///< fingerprint of the folder without any pack
  std::vector<std::string> active;  ///< ids, in their order
  std::map<std::string, LedgerEntry> known;
  std::optional<std::vector<std::string>> pending;  ///< what a change that is under way puts in force

  [[nodiscard]] std::string text() const;  ///< as the file has it
};

/// Throws Error(kCorruption) for a damaged file, Error(kUnsupported) for one of a newer emend.
[[nodiscard]] StoredState read_state(const std::filesystem::path& path);

/// The ledger has accepted the pack, whatever it was made for.
void rebase(EditPack& pack, const std::string& base);
/// The pack that the ledger knows by this name. Throws Error(kCorruption) for another that lies in its place.
[[nodiscard]] EditPack kept_pack(const std::filesystem::path& ledger, const std::string& id);
[[nodiscard]] std::vector<NamedPack> load_packs(const std::filesystem::path& ledger, const Lineage& lineage);

}  // namespace emend::editors::detail
