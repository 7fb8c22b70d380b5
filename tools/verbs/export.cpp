// An edit in the forms that other programs load.
#include <emend/core/error.h>
#include <emend/editors/merge.h>
#include <emend/editors/pack.h>
#include <emend/editors/peft.h>
#include <emend/models/gguf/gguf_lora.h>
#include <emend/models/gguf/gguf_writer.h>

#include <iostream>

#include "../model_options.h"
#include "../packs.h"
#include "../run_directory.h"

namespace emend::tools {
namespace {

struct Options {
  ModelOptions model;
  std::vector<std::string> packs;
  std::string to, out, type, base;
  editors::PeftOptions peft;
  editors::ApplyPackOptions apply;
};

// All packs as one, for this model.
editors::EditPack merged(const Options& options, const models::Model& model) {
  std::vector<editors::NamedPack> packs;
  for (const auto& path : options.packs) {
    packs.push_back({path, editors::load_pack(path)});
    editors::EditPack& pack = packs.back().pack;
    editors::require_base(pack, model.fingerprint(), options.apply, path);
    pack.base_fingerprint = model.fingerprint();
  }
  return editors::merge_packs(packs, editors::OnConflict::kSum).pack;
}

nlohmann::ordered_json export_lora(const Options& options, const models::Model& model, const editors::EditPack& pack) {
  std::vector<models::LoraFactors> factors;
  for (const auto& one : editors::adapter_factors(pack, options.peft))
    factors.push_back({one.weight, one.a_RI, one.b_OR});
  return {{"file", options.out}, {"tensors", models::write_gguf_lora(model, factors, options.out)}};
}

nlohmann::ordered_json export_peft_adapter(const Options& options, const models::Model& model,
                                           const editors::EditPack& pack) {
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const auto& layer : editors::export_peft(options.out, pack, model, options.peft))
    layers.push_back({{"weight", layer.weight}, {"rank", layer.rank}, {"relative_error", layer.error}});
  return {{"folder", options.out}, {"layers", layers}};
}

nlohmann::ordered_json export_gguf(const Options& options, models::Model& model, const editors::EditPack& pack,
                                   const Common& common) {
  const auto transaction = editors::apply_pack(model, pack);
  models::GgufWriteOptions write;
  if (!options.type.empty()) write.type = models::parse_ggml_type(options.type);
  write.base = options.base;
  write.log = &common.log;
  write.progress = common.progress;
  const auto report = models::write_gguf(model, options.out, write);
  nlohmann::ordered_json changed = nlohmann::ordered_json::array();
  for (const auto& tensor : report.tensors)
    if (tensor.changed)
      changed.push_back({{"tensor", tensor.name},
                         {"type", models::to_string(tensor.type)},
                         {"rounding_relative_to_edit", tensor.error_of_change}});
  return {{"file", options.out}, {"bytes", report.bytes}, {"changed", changed}, {"notes", report.notes}};
}

nlohmann::ordered_json export_folder(const Options& options, models::Model& model, const editors::EditPack& pack) {
  const auto transaction = editors::apply_pack(model, pack);
  return {{"folder", options.out}, {"changed", models::save_model(model, options.out)}};
}

int run(const Options& options, Common& common) {
  if (std::filesystem::exists(options.out) && !options.apply.force)
    throw Error(ErrorClass::kInvalidArgument,
                {options.out, "it exists already", "a new path", "choose another, or replace it with --force"});
  auto model = load_named(options.model, common);
  const auto pack = merged(options, model);
  nlohmann::ordered_json document = options.to == "peft"   ? export_peft_adapter(options, model, pack)
                                    : options.to == "lora" ? export_lora(options, model, pack)
                                    : options.to == "gguf" ? export_gguf(options, model, pack, common)
                                                           : export_folder(options, model, pack);
  document["format"] = options.to;
  if (common.json) {
    std::cout << dump_json(document) << '\n';
  } else {
    std::cout << "wrote " << options.out << " (" << options.to << ")\n";
    for (const auto& note : document.value("notes", nlohmann::ordered_json::array()))
      std::cout << "note: " << note.get<std::string>() << '\n';
  }
  return 0;
}

}  // namespace

VerbRun setup_export(CLI::App& command) {
  auto options = std::make_shared<Options>();
  command.add_option("PACK", options->packs, "edit packs, put together in this order")->required()->type_name("FILE");
  command
      .add_option("--to", options->to,
                  "peft (adapter folder), lora (GGUF adapter for llama.cpp --lora), gguf or model (the edited model)")
      ->required()
      ->check(CLI::IsMember({"peft", "lora", "gguf", "model"}));
  command.add_option("--out", options->out, "file or folder to write")->required()->type_name("PATH");
  add_model_options(command, options->model);
  const char* group = "Form";
  command.add_option("--max-rank", options->peft.max_rank, "largest rank of an adapter; 0: whatever is exact")
      ->group(group);
  command.add_option("--max-error", options->peft.max_error, "relative error that a cut to --max-rank may leave")
      ->group(group);
  command
      .add_option("--type", options->type,
                  "gguf: type of the matrices; default: as in the base, edited ones in Q8_0 or wider")
      ->group(group);
  command.add_option("--base", options->base, "gguf: unedited GGUF file of the model, whose other tensors are kept")
      ->group(group)
      ->type_name("FILE");
  add_base_options(command, options->apply, "replace --out; accept packs that were made for any other model");
  command.footer(
      "Examples\n"
      "  emend export runs/mine/edit.safetensors --to lora --out edit.gguf\n"
      "  emend export a.safetensors b.safetensors --model DIR --to peft --out adapter");
  return [options](Common& common) { return run(*options, common); };
}

}  // namespace emend::tools
