// What ledger.json of a model folder says.
#pragma once

#include <emend/editors/packs/ledger.h>

namespace emend::editors::detail {

struct StoredState {
  std::string base;                 ///< fingerprint of the folder without any pack
  std::vector<std::string> active;  ///< ids, in their order
  std::map<std::string, LedgerEntry> known;
  std::optional<std::vector<std::string>> pending;  ///< what a change that is under way puts in force

  [[nodiscard]] std::string text() const;  ///< as the file has it
};

/// Throws Error(kCorruption) for a damaged file, Error(kUnsupported) for one of a newer emend.
[[nodiscard]] StoredState read_state(const std::filesystem::path& path);

}  // namespace emend::editors::detail
