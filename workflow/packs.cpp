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
  auto all = editors::packs_in_force(model.checkpoint().path());
  const size_t before = all.size();
  for (const auto& path : paths) all.push_back({path, editors::load_pack(path)});
  const auto added = std::span(all).subspan(before);
  for (auto& [name, pack] : added) {
    auto here = editors::lineage_of(model.checkpoint().path());
    for (const auto& other : added) here.edits.push_back(other.pack.id);
    std::erase(here.edits, pack.id);
    editors::require_base(pack, model.fingerprint(), {}, name, here);
    pack.base_fingerprint = model.fingerprint();
  }
  editors::require_together(added, 0, false, "packs", "use one of them, or put them together first (emend merge)");
  for (const auto& [name, pack] : added) add(model, pack, name);
}

void Packs::add(models::Model& model, const editors::EditPack& pack, const std::string& name) {
  const auto transaction = editors::apply_pack(model, pack, {.runtime_apart = true});
  for (const auto& part : pack.runtime) runtime_.add(part, model, name);
  transaction->commit();
}

}  // namespace emend::workflow
