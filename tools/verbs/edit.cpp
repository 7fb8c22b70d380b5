// edit, eval, stats, direct: what changes a model and what judges it, as the library does both.
#include <emend/core/error.h>
#include <emend/workflow/direct/job.h>
#include <emend/workflow/preflight.h>
#include <emend/workflow/run.h>

#include <iostream>
#include <optional>

#include "../options.h"

namespace emend::tools {
namespace {

struct EvalArguments {
  ModelOptions model;
  FactOptions facts;
  MetricOptions metrics;
  PackOptions packs;
  uint64_t seed = 0;
};

// Both states of the model where packs are given; all processes of a group share the scoring.
int evaluate_named(const EvalArguments& options, Common& common) {
  const auto facts = workflow::load_named_facts(options.facts, common);
  const auto names = workflow::metric_names(options.metrics, facts);
  workflow::check_metrics(options.metrics, names);
  const auto checkpoint = open_named(options.model);
  const auto given = workflow::Packs::load(*checkpoint, options.packs.files, options.packs.apply);
  auto model = load_named(checkpoint, options.model, common);
  auto evaluate = workflow::evaluate_options(model, options.metrics, common, options.seed);
  workflow::Packs packs(model);
  const auto front = [&](std::string_view prompt) { return packs.runtime().prefix(prompt); };
  if (!packs.runtime().empty()) evaluate.front = front;  // of the folder's own edits
  const auto before = evaluation::evaluate_before(model, facts, names, evaluate, options.metrics.cache);
  std::vector<std::pair<std::string, nlohmann::json>> states = {{"before", before.summary}};
  nlohmann::ordered_json document = {
      {"facts", facts.facts.size()}, {"format", facts.format}, {"metrics", before.summary}};
  if (!given.empty()) {
    packs.add(model, given);
    evaluate.before = &before;
    evaluate.front = front;
    const auto after = evaluation::evaluate(model, facts, names, evaluate);
    states.emplace_back("after", after.summary);
    document["metrics"] = {{"pre", before.summary}, {"post", after.summary}};
  }
  if (common.sharing.first()) common.print(document, metrics_table(states));
  return 0;
}

struct StatsArguments {
  RunOptions edit;
  std::vector<int> layers;
};

int run_stats(const StatsArguments& options, const Common& common) {
  const auto& edit = options.edit;
  const auto checkpoint = open_named(edit.model);
  workflow::require_layers(options.layers, *checkpoint, "--layers");
  const auto& editor = workflow::chosen_editor(edit);
  std::optional<hparams::RawHparams> raw;
  if (options.layers.empty()) try {
      raw = workflow::find_hparams(editor.name, "", {}, *checkpoint, common.log);
    } catch (const Error& error) {
      if (error.error_class() != ErrorClass::kNotFound) throw;
      throw Error(ErrorClass::kNotFound, {"--layers", "no preset of " + editor.name + " fits this model",
                                          "the layers whose keys are to be read, such as 4,5,6", ""});
    }
  workflow::require_statistics(
      edit, *checkpoint,
      raw ? editor.effective(*raw, Log()).value("layers", nlohmann::json()) : nlohmann::json(options.layers));
  workflow::warn_of_edits_beside(*checkpoint, "stats.runtime", common.log);
  const auto model = load_named(checkpoint, edit.model, common);
  const auto layers = raw ? editor.make(*raw, model, common.log)->statistics_layers() : options.layers;
  if (layers.empty())
    refuse({"--editor", editor.name + ", whose settings for this model use no key statistics", "an editor that does",
            "name layers with --layers"});
  workflow::require_same(common.sharing, workflow::statistics_settings(edit));
  const auto statistics = workflow::statistics_provider(edit, common, true);
  statistics->prepare(model, layers);
  if (common.sharing.first()) std::cout << dump_json(statistics->describe()) << '\n';
  return 0;
}

// 6 where fewer facts are said than --strict (all) or --min-said ask for, 4 if the collapse guard stopped the run or no
// fact could be edited.
int run_edit(RunOptions options, Common& common) {
  if (options.facts.file.empty())
    refuse({"--resume", (options.out.empty() ? "no --out" : options.out + " holds no run that was interrupted"),
            "the folder of one that was", "name it with --out, or give --facts"});
  if (options.model.model.empty()) options.model.model = default_model_path().string();
  workflow::Run run(options, common);
  const bool speaks = common.sharing.first();
  if (options.dry_run) {
    if (speaks) std::cout << dump_json(run.plan()) << '\n';
    return 0;
  }
  run.execute();
  if (speaks) common.print(run.results(), run.summary());
  if (run.stopped() || run.nothing_edited()) return exit_code(ErrorClass::kNumeric);
  return run.said_enough() ? 0 : 6;
}

}  // namespace

VerbRun setup_edit(Options& o) {
  auto& options = o.arguments<RunOptions>();
  add_edit_options(o, options);
  o.footer =
      "Examples:\n"
      "  memit_edit --facts facts.json --out run\n"
      "  memit_edit --model DIR --facts facts.json --save pack,model --out run\n"
      "  memit_edit --facts facts.json --editor rome --set v_lr=0.2 --dry-run";
  o.earlier = [&options] {
    return options.resume ? workflow::RunCheckpoint::command_of(options.out) : std::vector<std::string>();
  };
  return [&options](Common& common) { return run_together(common, [&] { return run_edit(options, common); }); };
}

VerbRun setup_eval(Options& o) {
  auto& options = o.arguments<EvalArguments>();
  add_model_options(o, options.model);
  add_fact_options(o, options.facts, true);
  add_metric_options(o, options.metrics);
  add_pack_options(o, options.packs, "apply this edit pack first and show both states (repeatable)");
  o.group("Evaluation").add("--seed", &options.seed, "random seed");
  o.footer =
      "Examples:\n"
      "  emend eval --facts facts.json\n"
      "  emend eval --model DIR --facts facts.json --pack run/edit.safetensors --json";
  return [&options](Common& common) { return run_together(common, [&] { return evaluate_named(options, common); }); };
}

VerbRun setup_stats(Options& o) {
  auto& options = o.arguments<StatsArguments>();
  auto& edit = options.edit;
  add_model_options(o, edit.model);
  o.add("--layers", &options.layers, "layers; default: those of the editor's preset",
        {.limits = kNonNegative, .list = true})
      .add("--editor", &edit.editor, "whose preset names the layers", {.type = "NAME", .shown = "memit"});
  add_statistics_options(o.group(""), edit, false);
  add_cache_option(o.group(""), edit.metrics.cache, "folder of caches");
  o.add("--seed", &edit.seed, "random seed of sampled text and of the order of documents");
  o.footer =
      "Example:\n"
      "  emend stats --model DIR --corpus text.jsonl --stats-tokens auto";
  return [&options](Common& common) { return run_together(common, [&] { return run_stats(options, common); }); };
}

VerbRun setup_direct(Options& o) {
  struct Arguments {
    ModelOptions model;
    workflow::DirectOptions direct;
  };
  auto& options = o.arguments<Arguments>();
  add_model_options(o, options.model);
  workflow::declare_direct(o, options.direct);
  o.footer =
      "Examples\n"
      "  emend direct fit --preset slop --out slop\n"
      "  emend generate --control-vector slop/direction.gguf --strength -0.2 --layers 10-20 --prompt 'The old town'\n"
      "  emend direct ablate slop --layers 15-17 --out plain --save pack,lora\n"
      "  emend direct optimise slop --spare own --out plain\n"
      "  emend direct fit --preset wordiness --out wordy\n"
      "  emend direct optimise wordy --where answer-start --by bake --strength 2 --out brief";
  return [&options](Common& common) {
    const workflow::DirectJob job(options.direct);
    const auto checkpoint = open_named(options.model);
    job.check(*checkpoint);
    auto model = load_named(checkpoint, options.model, common);
    const auto result = job.run(model, common);
    common.print(result.document, result.text);
    return 0;
  };
}

}  // namespace emend::tools
