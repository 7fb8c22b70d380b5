// An edit in the forms that other programs load.
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/editors/packs/ledger.h>
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
};

int run_export(const ExportArguments& options, Common& common) {
  require_new(options.out, options.apply.force);
  auto model = load_named(options.model, common);
  const auto all = workflow::Packs::load(model, options.packs, options.apply, "export",
                                         setting("allow_conflicts") + " adds them all the same");
  const auto pack = editors::merge_packs(all, editors::OnConflict::kSum).pack;
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
      .add("--max-rank", &options.peft.max_rank, "largest rank of an adapter; 0: whatever is exact")
      .add("--max-error", &options.peft.max_error, "relative error that a cut to --max-rank may leave")
      .add("--type", &options.type, "gguf: type of the matrices; default: as in the base, edited ones in Q8_0 or wider")
      .add("--base", &options.base, "gguf: unedited GGUF file of the model, whose other tensors are kept",
           {.type = "FILE"});
  add_base_options(o, options.apply, "replace --out; accept packs that were made for any other model");
  o.footer =
      "Examples\n"
      "  emend export runs/mine/edit.safetensors --to lora --out edit.gguf\n"
      "  emend export a.safetensors b.safetensors --model DIR --to peft --out adapter";
  return [&options](Common& common) { return run_export(options, common); };
}

}  // namespace emend::tools
