// What a path names when edits are compared: a pack, the run that made one, or a model with the edits in force in it.
#pragma once

#include <emend/editors/pack.h>
#include <emend/models/checkpoint.h>

#include <memory>
#include <string>
#include <vector>

#include "cli.h"

namespace emend::tools {

struct EditSource {
  std::string name;  ///< as it was given
  std::string kind;  ///< "pack", "run" or "model"
  /// Everything that is in force against pack.base_fingerprint; of a model without edits, no change at all.
  editors::EditPack pack;
  std::vector<std::string> ids;                          ///< of a model's edits in force, in their order
  std::shared_ptr<const models::Checkpoint> checkpoint;  ///< of a model

  [[nodiscard]] bool is_model() const noexcept { return checkpoint != nullptr; }
  /// A model whose files are the base's.
  [[nodiscard]] bool is_unedited() const noexcept { return is_model() && ids.empty(); }
  /// "memit, 3 facts" or "no edits"
  [[nodiscard]] std::string summary() const;
};

/// A pack file, a run folder, a model folder (with its ledger), a GGUF file or ORG/NAME.
/// Throws Error(kNotFound) for anything else, and what load_pack and open_checkpoint throw.
[[nodiscard]] EditSource open_edit_source(const std::string& name, const Common& common);

/// "98.7 % of the change survived" of the weight that kept least, or nothing if no rounding was recorded.
[[nodiscard]] std::string survival_text(const nlohmann::json& extra);

}  // namespace emend::tools
