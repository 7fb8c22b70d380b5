// Edit packs as verbs name them: put into a model before a verb does its work, or compared with one another.
#pragma once

#include <emend/editors/packs/pack.h>
#include <emend/models/control_vector.h>
#include <emend/workflow/packs.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "options.h"

namespace emend::tools {

using workflow::Packs;

/// Adds --pack.
void add_pack_option(Options& o, std::vector<std::string>& packs,
                     const std::string& what = "apply this edit pack first (repeatable)");

/// A control vector that acts while a verb generates.
struct SteerArguments {
  std::string vector, layers;
  models::SteerOptions how;

  /// Reads the vector's file and the layers, so that what is wrong with them is known before a model is loaded. What it
  /// returns attaches them to one (null without a vector). They throw as models::read_control_vector and
  /// models::Steering.
  [[nodiscard]] std::function<std::unique_ptr<models::Steering>(const models::Model&)> read(const Log& log) const;
};
/// Says which edits in force go with a model that is to be replaced.
void warn_of_replaced(const std::string& folder, const Log& log);
/// Adds --control-vector, --strength, --layers, --steer and --decay.
void add_steer_options(Options& o, SteerArguments& options);

/// Adds --force (with this help), --accept-base and --allow-conflicts.
void add_base_options(Options& o, editors::ApplyPackOptions& options, const std::string& force_help);

/// What a path names when edits are compared: a pack, the run that made one, or a model with the edits in force in it.
struct EditSource {
  std::string name;  ///< as it was given
  std::string kind;  ///< "pack", "run" or "model"
  /// Everything that is in force against pack.base_fingerprint; of a model without edits, no change at all.
  editors::EditPack pack;
  std::vector<std::string> ids;                          ///< of a model's edits in force, in their order
  std::shared_ptr<const models::Checkpoint> checkpoint;  ///< of a model

  [[nodiscard]] bool is_model() const noexcept { return checkpoint != nullptr; }
  /// "memit, 3 facts" or "no edits"
  [[nodiscard]] std::string summary() const;
};

/// A pack file, a run folder, a model folder (with its ledger), a GGUF file or ORG/NAME.
/// Throws Error(kNotFound) for anything else, and what load_pack and open_checkpoint throw.
[[nodiscard]] EditSource open_edit_source(const std::string& name);

}  // namespace emend::tools
