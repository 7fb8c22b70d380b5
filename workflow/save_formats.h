// The forms in which an edit is saved, by a run (--save) and from packs (emend export). Adding one:
// workflow/save/<name>.cpp and a line in save_formats.def.
#pragma once

#include <emend/editors/packs/pack.h>
#include <emend/editors/packs/peft.h>
#include <emend/editors/steps/transaction.h>
#include <emend/models/model.h>
#include <emend/workflow/handles.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::workflow {

/// What is to be saved, and where.
struct SaveRequest {
  models::Model& model;
  const editors::EditPack& pack;  ///< the whole edit
  std::filesystem::path out;      ///< file or folder to write
  /// Of a run, whose edit is in the model: it takes the edit out for a while. Null: the model is unedited.
  editors::EditTransaction* edited = nullptr;
  /// The pack's own file, where it has one: of a run, or of one pack that is exported as it is.
  std::filesystem::path pack_file = {};
  editors::PeftOptions peft = {};
  std::string type = {}, base = {};  ///< of a GGUF file: type of its matrices, unedited file
  bool judged = false;               ///< the pack is taken for one of this model, whichever it names
  const Handles& lent;

  /// Puts the edit into an unedited model until the returned scope ends; null where it is in the model.
  [[nodiscard]] std::unique_ptr<editors::EditTransaction> with_edit() const {
    return edited ? nullptr : editors::apply_pack(model, pack, {.force = judged});
  }
};

struct SaveFormat {
  std::string name;      ///< "gguf"
  std::string file;      ///< in a run folder
  std::string label;     ///< "edited GGUF file"
  std::string summary;   ///< for help
  bool beside = false;   ///< also of edits that lie beside the weights
  bool adapter = false;  ///< has no place for biases and norms
  bool whole = false;    ///< holds the whole model
  /// Before anything is computed: throws Error(kUnsupported) naming `option` if the model has no such form. May be
  /// empty.
  std::function<void(const models::Model& model, const std::string& option)> check = {};
  /// Writes it and says what was written. A card of what lay there before goes (remove_card).
  std::function<nlohmann::ordered_json(const SaveRequest& request)> write = {};
};

/// In the order of save_formats.def.
[[nodiscard]] const std::vector<SaveFormat>& save_formats();
/// Throws Error(kInvalidArgument) with the list.
[[nodiscard]] const SaveFormat& save_format(const std::string& name);
/// Throws Error(kInvalidArgument) if something is at `out` that is not of this form (an edit pack, a GGUF file, a
/// folder with an adapter or with a model): programs may write one of their files again, not over another by mistake.
void require_own_kind(const SaveFormat& format, const std::filesystem::path& out);
/// Writes a pack, in the place of another or of none: a card of what lay there before goes. Throws as require_own_kind
/// and editors::save_pack.
void write_pack(const std::filesystem::path& out, const editors::EditPack& pack, const Log& log);

}  // namespace emend::workflow
