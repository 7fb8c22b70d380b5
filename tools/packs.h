// The edit packs that a verb puts into a model before it does its work.
#pragma once

#include <emend/editors/pack.h>
#include <emend/editors/runtime.h>
#include <emend/models/model.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace emend::tools {

/// Adds --pack.
void add_pack_option(CLI::App& command, std::vector<std::string>& packs, const std::string& what);

/// Adds --force (with this help) and --accept-base.
void add_base_options(CLI::App& command, editors::ApplyPackOptions& options, const std::string& force_help);

/// Packs in force: changes of weights are written into the model for good, what lies beside them stays attached as long
/// as this object lives.
class Packs {
 public:
  /// What the ledger of the model's own folder holds beside the weights (its weights are in the files already).
  explicit Packs(const models::Model& model);
  /// Throws Error(kInvalidArgument) naming the file if the pack is for another model.
  void apply(models::Model& model, const std::vector<std::string>& paths);
  [[nodiscard]] const editors::RuntimeScope& runtime() const noexcept { return runtime_; }

 private:
  editors::RuntimeScope runtime_;
};

}  // namespace emend::tools
