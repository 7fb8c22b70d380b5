// What lies in the ledger of a model folder: ledger.json and the packs that were applied.
#pragma once

#include <emend/core/safetensors.h>
#include <emend/editors/packs/ledger.h>
#include <emend/models/tied_head.h>

namespace emend::editors::detail {

constexpr const char *kFolder = ".emend", *kState = "ledger.json", *kOriginals = "originals.safetensors";

struct StoredState {
  std::string base;                 ///< fingerprint of the folder without any pack
  std::vector<std::string> active;  ///< ids, in their order
  std::map<std::string, LedgerEntry> known;
  std::optional<std::vector<std::string>> pending;  ///< what a change that is under way puts in force
  std::vector<std::string> forms = {};              ///< Lineage::forms

  [[nodiscard]] std::string text() const;  ///< as the file has it
};

/// Throws Error(kCorruption) for a damaged file, Error(kUnsupported) for one of a newer emend.
[[nodiscard]] StoredState read_state(const std::filesystem::path& path);

/// The pack that the ledger knows by this name. Throws Error(kCorruption) for another that lies in its place.
[[nodiscard]] EditPack kept_pack(const std::filesystem::path& ledger, const std::string& id);
/// The weights as they were. Throws Error(kCorruption) where the file is missing or damaged.
[[nodiscard]] SafetensorsFile open_originals(const std::filesystem::path& path);
/// Of a folder without ledger.json. Throws Error(kCorruption) if its weights are edited ones, as originals beside them
/// say: what is kept there would be written over.
void require_no_originals(const std::filesystem::path& model_folder);
/// The weights of a model folder.
struct FolderWeights {
  explicit FolderWeights(const std::filesystem::path& model_folder);
  std::map<std::string, std::filesystem::path> files;  ///< by the weights' names
  models::TiedNames tied;
};
/// A pack names weights as its model had them: a folder may carry or lack the family's base prefix, and store a tied
/// head beside the embedding, which has to change with that.
void respell(EditPack& pack, const FolderWeights& weights);
/// Packs in force as they were applied, moved apart. Throws what kept_pack and open_originals throw.
[[nodiscard]] std::vector<NamedPack> load_packs(const std::filesystem::path& ledger, const Lineage& lineage);

}  // namespace emend::editors::detail
