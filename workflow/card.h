// A model card: what was edited, how that was measured, how to take it back.
#pragma once

#include <emend/core/log.h>
#include <emend/editors/packs/pack.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::workflow {

/// One pack, as a card tells of it.
struct CardPack {
  std::string name;
  const editors::EditPack& pack;
  nlohmann::ordered_json results = {};  ///< of the run that made it; null where that is not known
};

/// results.json beside `file`, where the pack in it is the edit of that run: it has the run's name for it and as many
/// facts. Null elsewhere. Throws Error(kCorruption) naming a file that is no JSON.
[[nodiscard]] nlohmann::ordered_json results_of_run(const std::filesystem::path& file, const editors::EditPack& pack);
/// Markdown with the header that model hubs read. `base` is the model's name, `form` a name of save_formats.def.
[[nodiscard]] std::string model_card(const std::string& base, const std::vector<CardPack>& packs,
                                     const std::string& form);
/// Where the card of what was saved lies: README.md of a folder, NAME.md beside a file.
[[nodiscard]] std::filesystem::path card_path(const std::filesystem::path& saved);
/// Removes the card there that is of what lay at `saved` before, which is replaced. Cards of others stay.
void remove_card(const std::filesystem::path& saved, const Log& log);

}  // namespace emend::workflow
