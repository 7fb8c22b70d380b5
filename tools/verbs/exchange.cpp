// merge, export, import: edit packs of several people, and the forms of other programs.
#include <emend/core/atomic_file.h>
#include <emend/core/mapped.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/editors/packs/import_deltas.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/neurons_apart.h>
#include <emend/models/checkpoint.h>
#include <emend/models/gguf/ggml_type.h>
#include <emend/workflow/card.h>
#include <emend/workflow/save_formats.h>

#include <algorithm>

#include "../options.h"

namespace emend::tools {
namespace {

struct MergeArguments {
  ModelOptions model;
  std::vector<std::string> packs;
  std::string out, on_conflict = "fail";
  bool allow_conflicts = false, force = false;
};

nlohmann::ordered_json document_of(const MergeArguments& options, const std::vector<editors::NamedPack>& packs,
                                   const editors::Merge& merge) {
  nlohmann::ordered_json used = nlohmann::ordered_json::array(), left_out = nlohmann::ordered_json::array(),
                         conflicts = nlohmann::ordered_json::array(), weights = nlohmann::ordered_json::array();
  for (size_t i = 0; i < packs.size(); ++i) {
    const bool in = std::ranges::find(merge.used, i) != merge.used.end();
    (in ? used : left_out)
        .push_back({{"pack", packs[i].name}, {"editor", packs[i].pack.editor}, {"facts", packs[i].pack.facts.size()}});
  }
  for (const auto& conflict : merge.conflicts)
    conflicts.push_back({{"kind", editors::to_string(conflict.kind)},
                         {"packs", {packs[conflict.first].name, packs[conflict.second].name}},
                         {"what", conflict.what}});
  for (const auto& weight : merge.weights)
    weights.push_back({{"weight", weight.weight},
                       {"form", weight.rank > 0 ? "factors" : "dense"},
                       {"rank", weight.rank},
                       {"rank_joined", weight.rank_joined}});
  return {{"file", options.out},
          {"base", merge.pack.base_fingerprint},
          {"facts", merge.pack.facts.size()},
          {"used", used},
          {"left_out", left_out},
          {"conflicts", conflicts},
          {"weights", weights},
          {"beside", mapped(merge.pack.runtime, &editors::RuntimePart::kind)}};
}

std::string merge_text(const nlohmann::ordered_json& document) {
  std::string text = "wrote " + document["file"].get<std::string>() + ": " + counted(document["facts"], "fact") +
                     " of " + counted(document["used"].size(), "pack") + ", for the model " +
                     document["base"].get<std::string>().substr(0, 12) + "\n";
  TextTable weights({"weight", "rank", "of"});
  for (const auto& weight : document["weights"])
    weights.add({weight["weight"], weight["rank"] == 0 ? "dense" : weight["rank"].dump(),
                 weight["rank_joined"] == 0 ? "dense" : weight["rank_joined"].dump()});
  if (!document["weights"].empty()) text += weights.text();
  if (!document["beside"].empty())
    text += "beside the weights: " +
            join(document["beside"], ", ", [](const auto& kind) { return kind.template get<std::string>(); }) + "\n";
  for (const auto& conflict : document["conflicts"])
    text += "conflict (" + conflict["kind"].get<std::string>() + "): " + conflict["packs"][0].get<std::string>() +
            " and " + conflict["packs"][1].get<std::string>() + ": " + conflict["what"].get<std::string>() + "\n";
  for (const auto& pack : document["left_out"]) text += "left out: " + pack["pack"].get<std::string>() + "\n";
  return text;
}

int run_merge(const MergeArguments& options, const Common& common) {
  require_new(options.out, options.force);
  workflow::require_own_kind(workflow::save_format("pack"), options.out);
  std::vector<editors::NamedPack> packs;
  for (const auto& path : options.packs) packs.push_back({path, editors::load_pack(path)});
  if (!options.model.model.empty()) {
    const auto checkpoint = open_named(options.model);
    const std::string edited = editors::lineage_of(checkpoint->path()).base;
    const std::string base = edited.empty() ? models::model_fingerprint(*checkpoint) : edited;
    for (const auto& [name, pack] : packs)
      if (pack.root() != base)
        refuse({name, "a pack made for the model " + pack.root().substr(0, 12),
                "one for the model " + base.substr(0, 12) + " of " + setting("model", options.model.model),
                "name the model that the packs were made for"});
    editors::move_apart(packs, editors::originals_of(*checkpoint));
  }
  const auto merge =
      editors::merge_packs(packs, editors::parse_on_conflict(options.allow_conflicts ? "sum" : options.on_conflict));
  workflow::write_pack(options.out, merge.pack, common.log);
  const auto document = document_of(options, packs, merge);
  common.print(document, merge_text(document));
  return 0;
}

struct ExportArguments {
  ModelOptions model;
  std::vector<std::string> packs;
  std::string to, out, type, base;
  editors::PeftOptions peft;
  editors::ApplyPackOptions apply;
  bool card = false;
};

// What is written, told to people: with the results of the run that made a pack.
std::string card(const ExportArguments& options, const models::Model& model) {
  namespace fs = std::filesystem;
  const fs::path base = model.checkpoint().path();
  const auto before = editors::edits_of(base);
  const auto packs = mapped(options.packs, editors::load_pack);
  std::vector<workflow::CardPack> told;
  if (options.to == "model" || options.to == "gguf")  // an adapter holds none of what its base does
    for (const auto& [name, pack] : before) told.push_back({name, pack});
  for (size_t i = 0; i < packs.size(); ++i) {
    const fs::path file = options.packs[i];
    told.push_back({file.filename().string(), packs[i], workflow::results_of_run(file, packs[i])});
  }
  return workflow::model_card(models::model_name(base), told, options.to);
}

int run_export(const ExportArguments& options, Common& common) {
  require_new(options.out, options.apply.force);
  const bool folder = std::filesystem::path(workflow::save_format(options.to).file).extension().empty();
  if (!folder && !std::filesystem::path(options.out).has_filename())
    refuse({options.out, "the name of a folder", options.to + " is a file", "leave out the slash"});
  if (std::filesystem::exists(options.out) && std::filesystem::is_directory(options.out) != folder)
    refuse({options.out, folder ? "a file" : "a folder", options.to + (folder ? " is a folder" : " is a file"),
            "choose another"});
  warn_of_replaced(options.out, common.log);
  if (options.card && !folder) require_new(workflow::card_path(options.out), options.apply.force);
  if (!options.type.empty()) (void)models::parse_ggml_type(options.type);
  const auto checkpoint = open_named(options.model);
  if (options.to != "model") models::require_apart(options.out, checkpoint->path());
  if (!folder && std::filesystem::exists(options.out))
    workflow::require_own_kind(workflow::save_format(options.to), options.out);
  const auto all = workflow::Packs::load(*checkpoint, options.packs, options.apply, "export");
  auto model = load_named(checkpoint, options.model, common);
  for (const auto& one : all) editors::require_shapes(model, one.pack, one.name);
  const auto pack = editors::merge_packs(all, editors::OnConflict::kSum).pack;
  const std::string about = options.card ? card(options, model) : "";
  // Its file keeps the pack's id.
  const bool unaltered = all.size() == 1 && editors::load_pack(options.packs.front()).root() == all.front().pack.root();
  auto document = workflow::save_format(options.to)
                      .write({.model = model,
                              .pack = pack,
                              .out = options.out,
                              .pack_file = unaltered ? options.packs.front() : "",
                              .peft = options.peft,
                              .type = options.type,
                              .base = options.base,
                              .judged = options.apply.force,
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

struct ImportArguments {
  ModelOptions model;
  FactOptions facts;
  std::string source, out, weight, editor = "imported";
  bool force = false;
};

int run_import(const ImportArguments& options, const Common& common) {
  require_new(options.out, options.force);
  workflow::require_own_kind(workflow::save_format("pack"), options.out);
  if (!std::filesystem::exists(options.source))
    throw Error(ErrorClass::kNotFound, {options.source, "no such file", "a readable file or folder", "check the path"});
  const auto facts =
      options.facts.file.empty() ? datasets::FactSet() : workflow::load_named_facts(options.facts, common);
  const auto model = load_named(options.model, common);
  editors::EditResult result;
  result.editor = options.editor;
  result.hparams = nlohmann::json::object();
  result.deltas = editors::import_deltas(options.source, model, options.weight);
  const auto pack =
      editors::EditPack::from_results(model, std::span<const editors::EditResult>(&result, 1), facts.facts);
  workflow::write_pack(options.out, pack, common.log);
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

VerbRun setup_merge(Options& o) {
  auto& options = o.arguments<MergeArguments>();
  o.add("PACK", &options.packs, "edit packs for one model", {.type = "FILE", .required = true})
      .add("--out", &options.out, "the merged pack", {.type = "FILE", .required = true})
      .add("--model", &options.model.model,
           "the model that they were made for: where two packs write one neuron (latch), the later one's is moved",
           {.type = "MODEL"})
      .add("--on-conflict", &options.on_conflict,
           "when two packs do not go together (one question with two answers, a fact in both, a weight that both "
           "change as a whole): fail, first (leave out the later pack), last (the earlier one), sum (put both in)",
           {.choices = {"fail", "first", "last", "sum"}})
      .add("--allow-conflicts", &options.allow_conflicts, "the same as --on-conflict sum",
           {.excludes = "--on-conflict"})
      .add("--force", &options.force, "replace --out");
  o.footer =
      "The changes are added, so applying the merge equals applying the packs one after the other. Facts of one pack\n"
      "were solved for together: a pack in conflict is left out whole.\n"
      "Example\n"
      "  emend merge anna.safetensors ben.safetensors --model DIR --out team.safetensors";
  return [&options](Common& common) { return run_merge(options, common); };
}

VerbRun setup_export(Options& o) {
  auto& options = o.arguments<ExportArguments>();
  const auto forms = mapped(workflow::save_formats(), &workflow::SaveFormat::name);
  const auto meaning = [](const workflow::SaveFormat& format) { return format.name + ": " + format.summary; };
  o.add("PACK", &options.packs, "edit packs, put together in this order", {.type = "FILE", .required = true})
      .add("--to", &options.to, join(workflow::save_formats(), "; ", meaning), {.choices = forms, .required = true})
      .add("--out", &options.out, "file or folder to write", {.type = "PATH", .required = true});
  add_model_options(o, options.model);
  o.group("Form")
      .add("--max-rank", &options.peft.max_rank, "largest rank of an adapter; 0: whatever is exact",
           {.limits = kNonNegative, .only = {"peft", "lora"}})
      .add("--max-error", &options.peft.max_error, "relative error that a cut to --max-rank may leave",
           {.limits = kNonNegative, .only = {"peft", "lora"}})
      .add("--type", &options.type, "type of the matrices; default: as in the base, edited ones in Q8_0 or wider",
           {.only = {"gguf"}})
      .add("--base", &options.base, "unedited GGUF file of the model, whose other tensors are kept",
           {.type = "FILE", .only = {"gguf"}});
  o.add("--card", &options.card, "also write a model card: what was edited, how it was measured, how to take it back");
  add_base_options(o.group(""), options.apply, "replace --out; accept packs that were made for any other model");
  o.footer =
      "Examples\n"
      "  emend export runs/mine/edit.safetensors --to lora --out edit.gguf\n"
      "  emend export a.safetensors b.safetensors --model DIR --to peft --out adapter";
  return [&options](Common& common) { return run_export(options, common); };
}

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
  for (const char* name : {"--format", "--limit", "--offset", "--zsre-target"}) o.at(name).needs = "--facts";
  o.add("--name", &options.editor, "what lists call the method that made the changes")
      .add("--force", &options.force, "replace --out");
  o.footer = "Example\n  emend import adapter --model DIR --out edit.safetensors";
  return [&options](Common& common) { return run_import(options, common); };
}

}  // namespace emend::tools
