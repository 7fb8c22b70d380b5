#include <emend/core/setting.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/neurons_apart.h>
#include <emend/workflow/packs.h>

namespace emend::workflow {

void warn_of_edits_beside(const models::Checkpoint& checkpoint, const std::string& event, const Log& log) {
  if (editors::has_runtime_edits(checkpoint.path()))
    log.warning(event,
                checkpoint.path().string() + " has edits beside its weights in force: they take no part in this run");
}

Packs::Packs(models::Model& model, const std::vector<editors::NamedPack>& packs) {
  for (const auto& [name, pack] : editors::packs_in_force(model.checkpoint().path()))
    for (const auto& part : pack.runtime) runtime_.add(part, model, name);
  add(model, packs);
}

std::vector<editors::NamedPack> Packs::load(const models::Checkpoint& checkpoint, const std::vector<std::string>& paths,
                                            const editors::ApplyPackOptions& options, const std::string& where) {
  const std::string advice = setting("allow_conflicts") + " adds them all the same";
  if (paths.empty()) return {};
  auto all = editors::packs_in_force(checkpoint.path());
  const size_t before = all.size();
  for (const auto& path : paths) all.push_back({path, editors::load_pack(path)});
  const auto fingerprint = models::model_fingerprint(checkpoint);
  const auto lineage = editors::lineage_of(checkpoint.path());
  const auto added = std::span(all).subspan(before);
  for (auto& [name, pack] : added) {
    auto here = lineage;
    for (const auto& other : added)
      if (other.pack.id != pack.id) here.edits.push_back(other.pack.id);
    editors::require_base(pack, fingerprint, options, name, here);
  }
  editors::move_apart(all, editors::originals_of(checkpoint));
  std::vector<editors::NamedPack> accepted(added.begin(), added.end());
  for (auto& [name, pack] : accepted) {  // one of another model is this one's from here on
    const auto& own = lineage.base.empty() ? fingerprint : lineage.base;
    if (pack.base_fingerprint != fingerprint && pack.root() != own) pack.rebase(own);
  }
  // What is for this very file may change its answers; what is for its base may be in it already.
  auto repeated = editors::described_edits(checkpoint.path());
  const size_t held = repeated.size();
  for (const auto& one : added)
    if (held > 0 && one.pack.root() != fingerprint) repeated.push_back(one);
  for (auto& [name, pack] : repeated) {
    pack.base_fingerprint = fingerprint;
    pack.under = {};
  }
  editors::require_together(repeated, held, options.allow_conflicts, where, advice);
  for (auto& [name, pack] : all) pack.rebase(fingerprint);
  editors::require_together(all, before, options.allow_conflicts, where, advice);
  return accepted;
}

// Its weights are in the model as long as what is returned lives, and for good once that is committed.
static std::unique_ptr<editors::EditTransaction> put(models::Model& model, editors::RuntimeScope& runtime,
                                                     const editors::EditPack& pack, const std::string& name,
                                                     bool judged = false) {
  auto transaction = editors::apply_pack(model, pack, {.force = judged, .runtime_apart = true});
  for (const auto& part : pack.runtime) runtime.add(part, model, name);
  return transaction;
}

void Packs::add(models::Model& model, const std::vector<editors::NamedPack>& packs) {
  for (const auto& [name, pack] : packs) put(model, runtime_, pack, name, true)->commit();
}

void Packs::add(models::Model& model, const editors::EditPack& pack, const std::string& name) {
  put(model, runtime_, pack, name)->commit();
}

PackScope::~PackScope() {
  runtime_.clear();
  while (!applied_.empty()) applied_.pop_back();
}

void PackScope::add(const editors::EditPack& pack, const std::string& name) {
  applied_.push_back(put(model_, runtime_, pack, name));
}

}  // namespace emend::workflow
