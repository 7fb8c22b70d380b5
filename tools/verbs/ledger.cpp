// apply, revert, list, reorder: the edits of a model folder.
#include <emend/core/error.h>
#include <emend/editors/ledger.h>
#include <emend/models/checkpoint.h>

#include <iostream>

#include "../model_options.h"
#include "../packs.h"
#include "../run_directory.h"
#include "../text_table.h"

namespace emend::tools {
namespace {

constexpr double kWhole = 0.9999;  // of a change; less is shown

struct Options {
  ModelOptions model;
  std::vector<std::string> edits;
  std::string out;
  editors::ApplyPackOptions apply;
  bool all = false;
};

std::string resolved_model(const Options& options) {
  return models::open_checkpoint(options.model.model.empty() ? default_model_path().string() : options.model.model)
      ->path()
      .string();
}

// The folder whose files are to change: the model itself, or a copy of it in --out. A GGUF file is first written as a
// folder.
std::string target_folder(Options& options, const Common& common) {
  const std::string model = resolved_model(options);
  const bool folder = std::filesystem::is_directory(model);
  if (options.out.empty()) {
    if (folder) return model;
    throw Error(ErrorClass::kInvalidArgument,
                {model, "a GGUF file is not edited in place", "--out DIR for the edited model", ""});
  }
  if (folder) {
    editors::Ledger::copy_model_folder(model, options.out);
  } else {
    const auto loaded = load_named(options.model, common);
    options.apply.accepted_bases.push_back(loaded.fingerprint());
    models::save_model(loaded, options.out);
  }
  return options.out;
}

nlohmann::ordered_json listing(const editors::Ledger& ledger) {
  nlohmann::ordered_json edits = nlohmann::ordered_json::array();
  for (const auto& entry : ledger.entries())
    edits.push_back({{"id", entry.id},
                     {"active", entry.active},
                     {"editor", entry.editor},
                     {"facts", entry.facts},
                     {"subjects", entry.subjects},
                     {"weights", entry.weights},
                     {"survived", entry.survived},
                     {"changed_at", entry.applied_at}});
  return {{"base", ledger.base_fingerprint()}, {"edits", edits}};
}

void print(const editors::Ledger& ledger, const std::string& folder, const Common& common) {
  const auto document = listing(ledger);
  if (common.json) {
    std::cout << dump_json(document) << '\n';
    return;
  }
  std::cout << folder << " (base " << ledger.base_fingerprint().substr(0, 12) << ")\n";
  if (ledger.entries().empty()) std::cout << "  no edits\n";
  for (const auto& entry : ledger.entries()) {
    std::cout << "  " << entry.id << "  " << (entry.active ? "in force" : "reverted") << "  " << entry.editor << "  "
              << entry.facts << (entry.facts == 1 ? " fact" : " facts");
    for (size_t i = 0; i < entry.subjects.size(); ++i) std::cout << (i == 0 ? "  (" : ", ") << entry.subjects[i];
    if (!entry.subjects.empty()) std::cout << (static_cast<size_t>(entry.facts) > entry.subjects.size() ? ", …)" : ")");
    if (entry.survived < kWhole) std::cout << "  " << percent(entry.survived) << " survived rounding";
    std::cout << '\n';
  }
}

std::shared_ptr<Options> common_setup(CLI::App& command) {
  auto options = std::make_shared<Options>();
  command.add_option("--model", options->model.model, "model folder (or, with --out, a GGUF file or ORG/NAME)")
      ->type_name("MODEL");
  return options;
}

}  // namespace

VerbRun setup_apply(CLI::App& command) {
  auto options = common_setup(command);
  command.add_option("PACK", options->edits, "edit packs, applied in this order")->required()->type_name("FILE");
  command.add_option("--out", options->out, "leave the model as it is and write the edited one here")->type_name("DIR");
  add_base_options(command, options->apply, "apply packs that were made for any other model");
  return [options](Common& common) {
    const std::string folder = target_folder(*options, common);
    editors::Ledger ledger(folder, common.log);
    for (const auto& pack : options->edits) ledger.apply(pack, options->apply);
    print(ledger, folder, common);
    return 0;
  };
}

VerbRun setup_revert(CLI::App& command) {
  auto options = common_setup(command);
  auto* ids = command.add_option("EDIT", options->edits, "ids (or a unique beginning), or pack files")->type_name("ID");
  command.add_flag("--all", options->all, "every edit: the files get their original bytes")->excludes(ids);
  command.add_option("--out", options->out, "leave the model as it is and write the other one here")->type_name("DIR");
  return [options](Common& common) {
    if (options->edits.empty() && !options->all)
      throw Error(ErrorClass::kInvalidArgument,
                  {"revert", "nothing to revert", "ids of edits, or --all", "emend list shows them"});
    const std::string model = resolved_model(*options);
    if (!options->out.empty()) {
      editors::Ledger::copy_model_folder(model, options->out);
      std::filesystem::copy(std::filesystem::path(model) / ".emend", std::filesystem::path(options->out) / ".emend",
                            std::filesystem::copy_options::recursive);
    }
    const std::string folder = options->out.empty() ? model : options->out;
    editors::Ledger ledger(folder, common.log);
    if (options->all) ledger.revert_all();
    for (const auto& id : options->edits) ledger.revert(id);
    print(ledger, folder, common);
    return 0;
  };
}

VerbRun setup_reorder(CLI::App& command) {
  auto options = common_setup(command);
  command.add_option("ID", options->edits, "ids of all edits in force, in the order wanted")
      ->required()
      ->type_name("ID");
  return [options](Common& common) {
    const std::string folder = resolved_model(*options);
    editors::Ledger ledger(folder, common.log);
    ledger.reorder(options->edits);
    print(ledger, folder, common);
    return 0;
  };
}

VerbRun setup_list(CLI::App& command) {
  auto options = common_setup(command);
  return [options](Common& common) {
    const std::string folder = resolved_model(*options);
    const editors::Ledger ledger(folder, common.log);
    print(ledger, folder, common);
    return 0;
  };
}

}  // namespace emend::tools
