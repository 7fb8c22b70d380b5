// An edit in the forms that other programs load.
#include <emend/core/atomic_file.h>
#include <emend/core/json.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/editors/packs/ledger.h>
#include <emend/models/checkpoint.h>
#include <emend/workflow/card.h>
#include <emend/workflow/save_formats.h>

#include "../packs.h"

namespace emend::tools {
namespace {

struct ExportArguments {
  ModelOptions model;
  std::vector<std::string> packs;
  std::string to, out, type, base;
  editors::PeftOptions peft;
  editors::ApplyPackOptions apply;
  bool card = false;
};

// What is written, told to people: with the results that lie beside a pack in its run's folder.
std::string card(const ExportArguments& options, const models::Model& model) {
  namespace fs = std::filesystem;
  std::vector<editors::EditPack> packs;
  for (const auto& path : options.packs) packs.push_back(editors::load_pack(path));
  std::vector<workflow::CardPack> told;
  for (size_t i = 0; i < packs.size(); ++i) {
    const fs::path file = options.packs[i], results = file.parent_path() / "results.json";
    told.push_back({file.filename().string(), packs[i]});
    if (fs::exists(results)) told.back().results = read_json(results);
  }
  return workflow::model_card(models::model_name(model.checkpoint().path()), told, options.to);
}

int run_export(const ExportArguments& options, Common& common) {
  require_new(options.out, options.apply.force);
  const bool folder = std::filesystem::path(workflow::save_format(options.to).file).extension().empty();
  if (std::filesystem::exists(options.out) && std::filesystem::is_directory(options.out) != folder)
    refuse({options.out, folder ? "a file" : "a folder", options.to + (folder ? " is a folder" : " is a file"),
            "choose another"});
  if (options.card && !folder) require_new(workflow::card_path(options.out), options.apply.force);
  auto model = load_named(options.model, common);
  const auto all = workflow::Packs::load(model, options.packs, options.apply, "export",
                                         setting("allow_conflicts") + " adds them all the same");
  const auto pack = editors::merge_packs(all, editors::OnConflict::kSum).pack;
  const std::string about = options.card ? card(options, model) : "";
  auto document = workflow::save_format(options.to)
                      .write({.model = model,
                              .pack = pack,
                              .out = options.out,
                              .peft = options.peft,
                              .type = options.type,
                              .base = options.base,
                              .lent = common});
  document["format"] = options.to;
  std::string text = "wrote " + options.out + " (" + options.to + ")\n";
  if (options.card) {
    const auto path = workflow::card_path(options.out).string();
    write_file(path, about);
    document["card"] = path;
    text += "wrote " + path + "\n";
  }
  for (const auto& note : document.value("notes", nlohmann::ordered_json::array()))
    text += "note: " + note.get<std::string>() + "\n";
  common.print(document, text);
  return 0;
}

}  // namespace

VerbRun setup_export(Options& o) {
  auto& options = o.arguments<ExportArguments>();
  std::vector<std::string> forms;
  for (const auto& format : workflow::save_formats()) forms.push_back(format.name);
  const auto meaning = [](const workflow::SaveFormat& format) { return format.name + ": " + format.summary; };
  o.add("PACK", &options.packs, "edit packs, put together in this order", {.type = "FILE", .required = true})
      .add("--to", &options.to, join(workflow::save_formats(), "; ", meaning), {.choices = forms, .required = true})
      .add("--out", &options.out, "file or folder to write", {.type = "PATH", .required = true});
  add_model_options(o, options.model);
  o.group("Form")
      .add("--max-rank", &options.peft.max_rank, "largest rank of an adapter; 0: whatever is exact",
           {.limits = kNonNegative})
      .add("--max-error", &options.peft.max_error, "relative error that a cut to --max-rank may leave",
           {.limits = kNonNegative})
      .add("--type", &options.type, "gguf: type of the matrices; default: as in the base, edited ones in Q8_0 or wider")
      .add("--base", &options.base, "gguf: unedited GGUF file of the model, whose other tensors are kept",
           {.type = "FILE"});
  o.add("--card", &options.card, "also write a model card: what was edited, how it was measured, how to take it back");
  add_base_options(o, options.apply, "replace --out; accept packs that were made for any other model");
  o.footer =
      "Examples\n"
      "  emend export runs/mine/edit.safetensors --to lora --out edit.gguf\n"
      "  emend export a.safetensors b.safetensors --model DIR --to peft --out adapter";
  return [&options](Common& common) { return run_export(options, common); };
}

}  // namespace emend::tools
