// Changes that other programs have saved, as an edit pack.
#include <emend/core/error.h>
#include <emend/editors/import_deltas.h>
#include <emend/editors/pack.h>

#include <filesystem>
#include <iostream>

#include "../fact_options.h"
#include "../model_options.h"
#include "../run_directory.h"
#include "../text_table.h"

namespace emend::tools {
namespace {

struct Options {
  ModelOptions model;
  FactOptions facts;
  std::string source, out, weight, editor = "imported";
  bool force = false;
};

int run(const Options& options, const Common& common) {
  if (std::filesystem::exists(options.out) && !options.force)
    throw Error(ErrorClass::kInvalidArgument,
                {options.out, "it exists already", "a new path", "choose another, or replace it with --force"});
  const auto facts = options.facts.file.empty() ? datasets::FactSet() : load_named_facts(options.facts, common);
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
  if (common.json)
    std::cout << dump_json({{"file", options.out}, {"base", pack.base_fingerprint}, {"weights", weights}}) << '\n';
  else
    std::cout << "wrote " << options.out << " for the model " << pack.base_fingerprint.substr(0, 12) << "\n"
              << table.text();
  return 0;
}

}  // namespace

VerbRun setup_import(CLI::App& command) {
  auto options = std::make_shared<Options>();
  command
      .add_option(
          "SOURCE", options->source,
          "PEFT LoRA folder, or a safetensors or npz file of changes (W, W.key_mat and W.val_mat, W.left_vector and "
          "W.right_vector)")
      ->required()
      ->type_name("PATH");
  command.add_option("--out", options->out, "the edit pack")->required()->type_name("FILE");
  command
      .add_option("--weight", options->weight,
                  "the weight that a file of nameless vectors changes (left_vector and right_vector of a ROME cache)")
      ->type_name("NAME");
  add_model_options(command, options->model);
  add_fact_options(command, options->facts, false);
  command.add_option("--name", options->editor, "what lists call the method that made the changes");
  command.add_flag("--force", options->force, "replace --out");
  command.footer("Example\n  emend import adapter --model DIR --out edit.safetensors");
  return [options](Common& common) { return run(*options, common); };
}

}  // namespace emend::tools
