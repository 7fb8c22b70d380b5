// apply, revert, list, reorder: the edits of a model folder.
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/merge.h>
#include <emend/models/checkpoint.h>
#include <emend/models/gguf/gguf_file.h>
#include <emend/models/gguf/gguf_writer.h>

#include "../options.h"

namespace emend::tools {
namespace {

struct LedgerArguments {
  ModelOptions model;
  std::vector<std::string> edits;
  std::string out;
  editors::ApplyPackOptions apply;
  bool all = false;
};

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
                     {"under", entry.under},
                     {"changed_at", entry.applied_at}});
  return {{"base", ledger.base_fingerprint()}, {"edits", edits}};
}

// "3 facts  (Oslo, …)"
std::string told(size_t facts, const std::vector<std::string>& subjects) {
  const std::string more = facts > subjects.size() ? ", …)" : ")";
  return counted(facts, "fact") + (subjects.empty() ? "" : "  (" + join(subjects) + more);
}

int print_ledger(const editors::Ledger& ledger, const std::string& folder, const Common& common) {
  std::string text = folder + " (base " + ledger.base_fingerprint().substr(0, 12) + ")\n";
  if (ledger.entries().empty()) text += "  no edits\n";
  for (const auto& entry : ledger.entries()) {
    text += "  " + entry.id + "  " + (entry.active ? "in force" : "reverted") + "  " + entry.editor + "  " +
            told(static_cast<size_t>(entry.facts), entry.subjects);
    if (!entry.whole()) text += "  " + percent(entry.survived) + " survived rounding";
    if (!entry.under.empty()) text += "  on top of " + join(entry.under);
    text += "\n";
  }
  common.print(listing(ledger), text);
  return 0;
}

// What a GGUF file says of the edits in its weights.
int print_described(const std::string& file, const Common& common) {
  auto edits = nlohmann::ordered_json::array();
  std::string text = file + "\n";
  for (const auto& [name, pack] : editors::described_edits(file)) {
    std::vector<std::string> subjects;
    for (const auto& fact : pack.facts)
      if (subjects.size() < 3) subjects.push_back(editors::text_of(fact, "subject"));
    edits.push_back({{"editor", pack.editor}, {"facts", pack.facts.size()}, {"subjects", subjects}});
    text += "  in its weights  " + pack.editor + "  " + told(pack.facts.size(), subjects) + "\n";
  }
  text +=
      edits.empty() ? "  no edits\n" : "  They cannot be taken back from this file: keep the one that was edited.\n";
  common.print({{"edits", edits}}, text);
  return 0;
}

// What is edited in place must be the user's own folder; `elsewhere`: --out would do.
void require_own(const std::filesystem::path& model, bool folder, bool elsewhere, const Common& common) {
  const std::string hub = models::hub_name(model);
  if (folder && hub.empty()) return;
  const std::string name = hub.empty() ? model.stem().string() : hub.substr(hub.find('/') + 1);
  refuse({hub.empty() ? model.string() : hub,
          hub.empty() ? "a GGUF file, which is not edited in place"
                      : "a model in the Hugging Face cache, which other programs share",
          "a folder of its own for the edited model",
          elsewhere ? workflow::command_text(common.command_line) + " --out " + name + "-edited"
                    : "name a model folder that holds edits"});
}

// Lets `change` work on the model's ledger, or on that of a copy of the model in --out. A GGUF file is first written as
// a folder.
int change_model(LedgerArguments& options, const Common& common, const std::function<void(editors::Ledger&)>& change,
                 bool reverts = false, bool reorders = false) {
  const std::filesystem::path model = open_named(options.model)->path();
  const bool folder = std::filesystem::is_directory(model);
  if (options.out.empty()) {
    require_own(model, folder, !reorders && (folder || !reverts), common);
    editors::Ledger ledger(model, common.log);
    change(ledger);
    return print_ledger(ledger, model.string(), common);
  }
  const auto write = [&](const std::filesystem::path& to) {
    if (folder) return editors::copy_model_folder(model, to);
    const auto edits = models::GgufFile(model).texts(models::kGgufEdits).size();
    const std::string holds = counted(edits, "edit") + " in its weights that cannot be taken back from there";
    if (reverts)
      refuse({model.string(), edits > 0 ? holds : "a GGUF file, which has no ledger", "a model folder with a ledger",
              edits > 0 ? "start from the file that was edited" : ""});
    if (edits > 0) {
      (void)Packs::load(*models::open_checkpoint(model.string()), options.edits, options.apply, "apply");
      common.log.warning("ledger.gguf",
                         model.string() + ": " + holds + ", and that the new folder's ledger does not list");
    }
    const auto loaded = load_named(options.model, common);
    options.apply.accepted_bases.push_back(loaded.fingerprint());
    models::save_model(loaded, to);
  };
  editors::write_edited_folder(options.out, write, change, /*replace=*/false, common.log, model);
  return print_ledger(editors::Ledger(options.out, common.log), options.out, common);
}

LedgerArguments& common_setup(Options& o, const std::string& more = "", bool any_model = false) {
  auto& options = o.arguments<LedgerArguments>();
  o.add("--model", &options.model.model, "model folder" + more, {.type = "MODEL", .required = !any_model});
  return options;
}

}  // namespace

VerbRun setup_apply(Options& o) {
  auto& options = common_setup(o, " (or, with --out, a GGUF file or ORG/NAME)", true);
  o.add("PACK", &options.edits, "edit packs, applied in this order", {.type = "FILE", .required = true})
      .add("--out", &options.out, "leave the model as it is and write the edited one here", {.type = "DIR"});
  add_base_options(o.group(""), options.apply);
  return [&options](Common& common) {
    return change_model(options, common, [&](editors::Ledger& ledger) {
      ledger.apply({options.edits.begin(), options.edits.end()}, options.apply);
    });
  };
}

VerbRun setup_revert(Options& o) {
  auto& options = common_setup(o, " (or, with --out, ORG/NAME)");
  o.add("EDIT", &options.edits, "ids (or a unique beginning), or pack files", {.type = "ID"})
      .add("--all", &options.all, "every edit: the files get their original bytes", {.excludes = "EDIT"})
      .add("--out", &options.out, "leave the model as it is and write the other one here", {.type = "DIR"});
  return [&options](Common& common) {
    if (options.edits.empty() && !options.all)
      refuse({"revert", "nothing to revert", "ids of edits, or --all", "emend list shows them"});
    return change_model(
        options, common,
        [&](editors::Ledger& ledger) { options.all ? ledger.revert_all() : ledger.revert(options.edits); }, true);
  };
}

VerbRun setup_reorder(Options& o) {
  auto& options = common_setup(o);
  o.add("ID", &options.edits, "ids of all edits in force, in the order wanted", {.type = "ID", .required = true});
  return [&options](Common& common) {
    return change_model(
        options, common, [&](editors::Ledger& ledger) { ledger.reorder(options.edits); }, false, true);
  };
}

VerbRun setup_list(Options& o) {
  auto& options = common_setup(o, " or GGUF file");
  return [&options](Common& common) {
    const std::string folder = open_named(options.model)->path().string();
    if (std::filesystem::is_regular_file(folder)) return print_described(folder, common);
    return print_ledger(editors::Ledger(folder, common.log), folder, common);
  };
}

}  // namespace emend::tools
