// Packs of several people as one.
#include <emend/core/text_table.h>
#include <emend/editors/packs/merge.h>

#include <algorithm>

#include "../cli.h"

namespace emend::tools {
namespace {

struct MergeArguments {
  std::vector<std::string> packs;
  std::string out, on_conflict = "fail";
  bool allow_conflicts = false, force = false;
};

nlohmann::ordered_json document_of(const MergeArguments& options, const std::vector<editors::NamedPack>& packs,
                                   const editors::Merge& merge) {
  nlohmann::ordered_json used = nlohmann::ordered_json::array(), left_out = nlohmann::ordered_json::array(),
                         conflicts = nlohmann::ordered_json::array(), weights = nlohmann::ordered_json::array();
  for (size_t i = 0; i < packs.size(); ++i) {
    const bool in = std::find(merge.used.begin(), merge.used.end(), i) != merge.used.end();
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
          {"weights", weights}};
}

std::string merge_text(const nlohmann::ordered_json& document) {
  std::string text = "wrote " + document["file"].get<std::string>() + ": " + counted(document["facts"], "fact") +
                     " of " + counted(document["used"].size(), "pack") + ", for the model " +
                     document["base"].get<std::string>().substr(0, 12) + "\n";
  TextTable weights({"weight", "rank", "of"});
  for (const auto& weight : document["weights"])
    weights.add({weight["weight"], weight["rank"] == 0 ? "dense" : weight["rank"].dump(),
                 weight["rank_joined"] == 0 ? "dense" : weight["rank_joined"].dump()});
  text += weights.text();
  for (const auto& conflict : document["conflicts"])
    text += "conflict (" + conflict["kind"].get<std::string>() + "): " + conflict["packs"][0].get<std::string>() +
            " and " + conflict["packs"][1].get<std::string>() + ": " + conflict["what"].get<std::string>() + "\n";
  for (const auto& pack : document["left_out"]) text += "left out: " + pack["pack"].get<std::string>() + "\n";
  return text;
}

int run_merge(const MergeArguments& options, const Common& common) {
  require_new(options.out, options.force);
  std::vector<editors::NamedPack> packs;
  for (const auto& path : options.packs) packs.push_back({path, editors::load_pack(path)});
  const auto merge =
      editors::merge_packs(packs, editors::parse_on_conflict(options.allow_conflicts ? "sum" : options.on_conflict));
  editors::save_pack(options.out, merge.pack);
  const auto document = document_of(options, packs, merge);
  common.print(document, merge_text(document));
  return 0;
}

}  // namespace

VerbRun setup_merge(Options& o) {
  auto& options = o.arguments<MergeArguments>();
  o.add("PACK", &options.packs, "edit packs for one model", {.type = "FILE", .required = true})
      .add("--out", &options.out, "the merged pack", {.type = "FILE", .required = true})
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
      "  emend merge anna.safetensors ben.safetensors --out team.safetensors";
  return [&options](Common& common) { return run_merge(options, common); };
}

}  // namespace emend::tools
