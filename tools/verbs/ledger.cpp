// apply, revert, list, reorder: the edits of a model folder.
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/editors/packs/ledger.h>
#include <emend/models/checkpoint.h>

#include "../packs.h"
#include "../text_table.h"

namespace emend::tools {
namespace {

constexpr double kWhole = 0.9999;  // of a change; less is shown

struct LedgerArguments {
  ModelOptions model;
  std::vector<std::string> edits;
  std::string out;
  editors::ApplyPackOptions apply;
  bool all = false;
};

std::string resolved_model(const LedgerArguments& options) {
  return open_named(options.model)->path().string();
}

// The folder whose files are to change: the model itself, or a copy of it in --out. A GGUF file is first written as a
// folder.
std::string target_folder(LedgerArguments& options, const Common& common) {
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

int print_ledger(const editors::Ledger& ledger, const std::string& folder, const Common& common) {
  std::string text = folder + " (base " + ledger.base_fingerprint().substr(0, 12) + ")\n";
  if (ledger.entries().empty()) text += "  no edits\n";
  for (const auto& entry : ledger.entries()) {
    text += "  " + entry.id + "  " + (entry.active ? "in force" : "reverted") + "  " + entry.editor + "  " +
            std::to_string(entry.facts) + (entry.facts == 1 ? " fact" : " facts");
    const bool more = static_cast<size_t>(entry.facts) > entry.subjects.size();
    if (!entry.subjects.empty()) text += "  (" + join(entry.subjects) + (more ? ", …)" : ")");
    if (entry.survived < kWhole) text += "  " + percent(entry.survived) + " survived rounding";
    text += "\n";
  }
  common.print(listing(ledger), text);
  return 0;
}

LedgerArguments& common_setup(Options& o) {
  auto& options = o.arguments<LedgerArguments>();
  o.add("--model", &options.model.model, "model folder (or, with --out, a GGUF file or ORG/NAME)", {.type = "MODEL"});
  return options;
}

}  // namespace

VerbRun setup_apply(Options& o) {
  auto& options = common_setup(o);
  o.add("PACK", &options.edits, "edit packs, applied in this order", {.type = "FILE", .required = true})
      .add("--out", &options.out, "leave the model as it is and write the edited one here", {.type = "DIR"});
  add_base_options(o, options.apply, "apply packs that were made for any other model");
  return [&options](Common& common) {
    const std::string folder = target_folder(options, common);
    editors::Ledger ledger(folder, common.log);
    for (const auto& pack : options.edits) ledger.apply(pack, options.apply);
    return print_ledger(ledger, folder, common);
  };
}

VerbRun setup_revert(Options& o) {
  auto& options = common_setup(o);
  o.add("EDIT", &options.edits, "ids (or a unique beginning), or pack files", {.type = "ID"})
      .add("--all", &options.all, "every edit: the files get their original bytes", {.excludes = "EDIT"})
      .add("--out", &options.out, "leave the model as it is and write the other one here", {.type = "DIR"});
  return [&options](Common& common) {
    if (options.edits.empty() && !options.all)
      throw Error(ErrorClass::kInvalidArgument,
                  {"revert", "nothing to revert", "ids of edits, or --all", "emend list shows them"});
    const std::string model = resolved_model(options);
    if (!options.out.empty()) {
      editors::Ledger::copy_model_folder(model, options.out);
      std::filesystem::copy(std::filesystem::path(model) / ".emend", std::filesystem::path(options.out) / ".emend",
                            std::filesystem::copy_options::recursive);
    }
    const std::string folder = options.out.empty() ? model : options.out;
    editors::Ledger ledger(folder, common.log);
    if (options.all) ledger.revert_all();
    for (const auto& id : options.edits) ledger.revert(id);
    return print_ledger(ledger, folder, common);
  };
}

VerbRun setup_reorder(Options& o) {
  auto& options = common_setup(o);
  o.add("ID", &options.edits, "ids of all edits in force, in the order wanted", {.type = "ID", .required = true});
  return [&options](Common& common) {
    const std::string folder = resolved_model(options);
    editors::Ledger ledger(folder, common.log);
    ledger.reorder(options.edits);
    return print_ledger(ledger, folder, common);
  };
}

VerbRun setup_list(Options& o) {
  auto& options = common_setup(o);
  return [&options](Common& common) {
    const std::string folder = resolved_model(options);
    return print_ledger(editors::Ledger(folder, common.log), folder, common);
  };
}

}  // namespace emend::tools
