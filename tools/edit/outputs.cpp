#include "outputs.h"

#include <emend/core/error.h>
#include <emend/editors/ledger.h>
#include <emend/editors/pack.h>
#include <emend/editors/peft.h>
#include <emend/models/checkpoint.h>
#include <emend/models/config.h>
#include <emend/models/gguf/detail/gguf_architecture.h>
#include <emend/models/gguf/gguf_writer.h>

#include "figures.h"

namespace emend::tools {
namespace {

editors::EditPack make_pack(const datasets::FactSet& facts, const models::Model& model, const RunRecord& record,
                            uint64_t seed) {
  editors::EditResult all;
  all.editor = record.editor;
  all.hparams = record.hparams;
  all.seed = seed;
  for (const auto& batch : record.batches)
    all.deltas.insert(all.deltas.end(), batch.deltas.begin(), batch.deltas.end());
  if (!record.batches.empty() && !record.batches.back().contexts.is_null())
    all.contexts = editors::parse_contexts(record.batches.back().contexts, "run");
  auto pack = editors::EditPack::from_results(model, std::span<const editors::EditResult>(&all, 1), facts.facts);
  pack.runtime = record.runtime;
  if (at::isReducedFloatingType(model.dtype())) {
    pack.extra["dtype"] = c10::toString(model.dtype());
    pack.extra["survived"] = survived_by_weight(record.batches);
  }
  return pack;
}

// A copy of the model in which only the edited tensors differ. They get eight bits where the file has fewer.
std::filesystem::path write_edited_gguf(const models::Model& model, const RunDirectory& folder, const Log& log) {
  const auto path = folder / "model.gguf";
  models::GgufWriteOptions options;
  options.log = &log;
  const auto report = models::write_gguf(model, path, options);
  for (const auto& tensor : report.tensors)
    if (tensor.changed && tensor.error_of_change > 0.5)
      log.warning("save.gguf", tensor.name + ": rounding to " + std::string(models::to_string(tensor.type)) +
                                   " takes away " + std::to_string(static_cast<int>(100 * tensor.error_of_change)) +
                                   " % of the size of the edit");
  return path;
}

// The unedited folder, into which the ledger then puts the pack.
void write_base_model(const models::Model& model, const std::filesystem::path& folder,
                      editors::EditTransaction& transaction) {
  if (std::filesystem::exists(folder)) std::filesystem::remove_all(folder);  // left by an interrupted run
  if (model.checkpoint().format() == "huggingface") {
    editors::Ledger::copy_model_folder(model.checkpoint().path(), folder);
  } else {
    transaction.restore();
    models::save_model(model, folder);
  }
}

}  // namespace

void check_outputs(const EditOptions& options, const models::Model& model) {
  if (options.saves("gguf")) (void)models::detail::gguf_architecture_for(model.config().model_type, "--save gguf");
}

void save_outputs(const EditOptions& options, const RunDirectory& folder, const datasets::FactSet& facts,
                  const models::Model& model, editors::EditTransaction& transaction, const Log& log,
                  RunRecord& record) {
  if (options.saves("none") || options.single()) return;
  const auto pack_path = folder / "edit.safetensors";
  const auto pack = make_pack(facts, model, record, options.seed);
  editors::save_pack(pack_path, pack);
  record.files["edit pack"] = pack_path.string();
  if (options.saves("gguf") && !pack.runtime.empty())
    throw Error(ErrorClass::kUnsupported, {"--save", "gguf, with an edit of " + pack.editor + " beside the weights",
                                           "pack or model", "emend loads such an edit with --pack"});
  if (options.saves("gguf")) record.files["edited GGUF file"] = write_edited_gguf(model, folder, log).string();
  if (options.saves("model")) {
    const auto path = folder / "model";
    write_base_model(model, path, transaction);
    editors::Ledger(path).apply(pack_path, {.accepted_bases = {model.fingerprint()}});
    record.files["edited model"] = path.string();
  }
  if (options.saves("peft")) {
    const auto path = folder / "adapter";
    editors::export_peft(path, pack, model);
    record.files["adapter"] = path.string();
  }
}

}  // namespace emend::tools
