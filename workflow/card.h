// A model card: what was edited, how that was measured, how to take it back.
#pragma once

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

/// Markdown with the header that model hubs read. `base` is the model's name, `form` a name of save_formats.def.
[[nodiscard]] std::string model_card(const std::string& base, const std::vector<CardPack>& packs,
                                     const std::string& form);
/// Where the card of what was saved lies: README.md of a folder, NAME.md beside a file.
[[nodiscard]] std::filesystem::path card_path(const std::filesystem::path& saved);

}  // namespace emend::workflow
