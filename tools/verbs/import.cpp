// Changes that other programs have saved, as an edit pack.
#include <emend/core/text_table.h>
#include <emend/editors/packs/import_deltas.h>
#include <emend/editors/packs/pack.h>

#include "../fact_options.h"
#include "../model_options.h"

namespace emend::tools {
namespace {

struct ImportArguments {
  ModelOptions model;
  FactOptions facts;
  std::string source, out, weight, editor = "imported";
  bool force = false;
};

int run_import(const ImportArguments& options, const Common& common) {
  require_new(options.out, options.force);
  const auto facts =
      options.facts.file.empty() ? datasets::FactSet() : workflow::load_named_facts(options.facts, common);
  const auto model = load_named(options.model, common);
  editors::EditResult result;
  result.editor = options.editor;
  result.hparams = nlohmann::json::object();
  result.deltas = editors::import_deltas(options.source, model, options.weight);
  const auto pack =
      editors::EditPack::from_results(model, std::span<const editors::EditResult>(&result, 1), facts.facts);
  editors::save_pack(options.out, pack);
  auto weights = nlohmann::ordered_json::array();
  TextTable table({"weight", "form", "‖ΔW‖"});
  for (const auto& delta : pack.deltas) {
    const std::string form = delta.low_rank() ? "rank " + std::to_string(delta.rank()) : "dense";
    weights.push_back({{"weight", delta.weight}, {"form", form}, {"norm", delta.norm()}});
    table.add({delta.weight, form, short_number(delta.norm())});
  }
  common.print({{"file", options.out}, {"base", pack.base_fingerprint}, {"weights", weights}},
               "wrote " + options.out + " for the model " + pack.base_fingerprint.substr(0, 12) + "\n" + table.text());
  return 0;
}

}  // namespace

VerbRun setup_import(Options& o) {
  auto& options = o.arguments<ImportArguments>();
  o.add("SOURCE", &options.source,
        "PEFT LoRA folder, or a safetensors or npz file of changes (W, W.key_mat and W.val_mat, W.left_vector and "
        "W.right_vector)",
        {.type = "PATH", .required = true})
      .add("--out", &options.out, "the edit pack", {.type = "FILE", .required = true})
      .add("--weight", &options.weight,
           "the weight that a file of nameless vectors changes (left_vector and right_vector of a ROME cache)",
           {.type = "NAME"});
  add_model_options(o, options.model);
  add_fact_options(o, options.facts, false);
  o.add("--name", &options.editor, "what lists call the method that made the changes")
      .add("--force", &options.force, "replace --out");
  o.footer = "Example\n  emend import adapter --model DIR --out edit.safetensors";
  return [&options](Common& common) { return run_import(options, common); };
}

}  // namespace emend::tools
