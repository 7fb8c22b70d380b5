#include <emend/editors/packs/ledger.h>
#include <emend/models/checkpoint.h>
#include <emend/workflow/packs.h>

namespace emend::workflow {

Packs::Packs(models::Model& model, const std::vector<std::string>& paths) {
  for (const auto& path : editors::active_runtime_packs(model.checkpoint().path()))
    for (const auto& part : editors::load_pack(path).runtime) runtime_.add(part, model, path.string());
  add(model, paths);
}

void Packs::add(models::Model& model, const std::vector<std::string>& paths) {
  for (const auto& path : paths) add(model, editors::load_pack(path), path);
}

void Packs::add(models::Model& model, const editors::EditPack& pack, const std::string& name) {
  const auto transaction = editors::apply_pack(model, pack, {.runtime_apart = true});
  for (const auto& part : pack.runtime) runtime_.add(part, model, name);
  transaction->commit();
}

}  // namespace emend::workflow
