#include "packs.h"

#include <emend/editors/ledger.h>
#include <emend/models/checkpoint.h>

namespace emend::tools {

void add_pack_option(CLI::App& command, std::vector<std::string>& packs, const std::string& what) {
  command.add_option("--pack", packs, what)->group("Model")->type_name("FILE");
}

void add_base_options(CLI::App& command, editors::ApplyPackOptions& options, const std::string& force_help) {
  command.add_flag("--force", options.force, force_help);
  command
      .add_option("--accept-base", options.accepted_bases,
                  "accept packs for the model with this fingerprint (8 digits or more): the same model in another form")
      ->type_name("FINGERPRINT");
}

Packs::Packs(const models::Model& model) {
  for (const auto& path : editors::active_runtime_packs(model.checkpoint().path()))
    for (const auto& part : editors::load_pack(path).runtime) runtime_.add(part, model, path.string());
}

void Packs::apply(models::Model& model, const std::vector<std::string>& paths) {
  for (const auto& path : paths) {
    const editors::EditPack pack = editors::load_pack(path);
    auto transaction = editors::apply_pack(model, pack, {.runtime_apart = true});
    for (const auto& part : pack.runtime) runtime_.add(part, model, path);
    transaction->commit();
  }
}

}  // namespace emend::tools
