#include "outputs.h"

#include <emend/core/error.h>
#include <emend/editors/ledger.h>
#include <emend/editors/pack.h>
#include <emend/editors/peft.h>
#include <emend/models/checkpoint.h>

namespace emend::tools {
namespace {

editors::EditPack make_pack(const datasets::FactSet& facts, const models::Model& model, const RunRecord& record, uint64_t seed) {
  editors::EditResult all;
  all.editor = record.editor;
  all.hparams = record.hparams;
  all.seed = seed;
  for (const auto& batch : record.batches) all.deltas.insert(all.deltas.end(), batch.deltas.begin(), batch.deltas.end());
  if (!record.batches.empty() && !record.batches.back().contexts.is_null())
    all.contexts = editors::parse_contexts(record.batches.back().contexts, "run");
  return editors::EditPack::from_results(model, std::span<const editors::EditResult>(&all, 1), facts.facts);
}

// The unedited folder, into which the ledger then puts the pack.
void write_base_model(const models::Model& model, const std::filesystem::path& folder, editors::EditTransaction& transaction) {
  if (std::filesystem::exists(folder)) std::filesystem::remove_all(folder);  // left by an interrupted run
  if (model.checkpoint().format() == "huggingface") {
    editors::Ledger::copy_model_folder(model.checkpoint().path(), folder);
  } else {
    transaction.restore();
    models::save_model(model, folder);
  }
}

}  // namespace

void save_outputs(const EditOptions& options, const RunDirectory& folder, const datasets::FactSet& facts, const models::Model& model,
                  editors::EditTransaction& transaction, RunRecord& record) {
  if (options.saves("none")) return;
  const auto pack_path = folder / "edit.safetensors";
  const auto pack = make_pack(facts, model, record, options.seed);
  editors::save_pack(pack_path, pack);
  record.files["edit pack"] = pack_path.string();
  if (options.saves("model")) {
    const auto path = folder / "model";
    write_base_model(model, path, transaction);
    editors::Ledger(path).apply(pack_path, model.fingerprint());
    record.files["edited model"] = path.string();
  }
  if (options.saves("peft")) {
    const auto path = folder / "adapter";
    editors::export_peft(path, pack, model);
    record.files["adapter"] = path.string();
  }
  if (options.saves("gguf"))
    throw Error(ErrorClass::kUnsupported, {"--save", "gguf", "pack, model or peft", ""});
}

}  // namespace emend::tools
