// suggest: a hyper-parameter file for a model that has no preset, with the evidence for it.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/editors/registry.h>
#include <emend/editors/transaction.h>
#include <emend/models/config.h>
#include <emend/models/family.h>

#include <cmath>
#include <cstdio>
#include <iostream>

#include "../edit/inputs.h"
#include "../run_directory.h"
#include "../trace_options.h"

namespace emend::tools {
namespace {

constexpr const char* kExamples = R"(Examples:
  emend suggest --out smollm2.yaml                                layers, from tracing emend's own facts
  emend suggest --facts known_1000.json --limit 50 --json
  emend suggest --try mine.json --try-limit 16 --corpus wiki.jsonl --out mine.yaml
      also edits 16 of your facts with several weights of the old knowledge, and keeps the best

The file goes to memit_edit --hparams FILE. Layers end where restoring MLP outputs at the subject's last token brings
back most of the answer; the rest comes from the closest preset, or from the editor's defaults.)";

struct Options {
  TraceSettings trace;
  EditOptions edit;  // statistics and facts of the sweep
  std::string editor = "memit", out;
  int layers = 5;
  std::vector<double> shares = {0.025, 0.05, 0.1, 0.2, 0.4, 0.9};
};

std::string joined(const nlohmann::json& layers) {
  std::string text;
  for (const auto& layer : layers) text += (text.empty() ? "" : ", ") + layer.dump();
  return "[" + text + "]";
}

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

/// The closest preset's values, or none; `note` says which.
hparams::RawHparams base_hparams(const Options& options, const models::Checkpoint& checkpoint,
                                 const models::Model& model, const Common& common, std::string& note) {
  try {
    auto raw = editor_hparams(options.editor, "", {}, checkpoint, &model, common);
    note = "other values from " + raw.source();
    return raw;
  } catch (const Error& error) {
    if (error.error_class() != ErrorClass::kNotFound) throw;
    note = "no preset of " + options.editor + " fits this model: other values are the editor's defaults";
    return hparams::RawHparams("emend suggest");
  }
}

/// One weight of the old knowledge, tried on the user's facts.
struct Trial {
  double weight = 0, score = 0, efficacy = 0;
};

Trial try_weight(models::Model& model, const datasets::FactSet& facts, const Options& options,
                 const hparams::RawHparams& base, double weight, const Common& common) {
  auto raw = base;
  raw.set("mom2_update_weight=" + short_number(weight));
  const auto editor = editors::make_editor(options.editor, raw, model, common.log);
  const auto statistics = statistics_provider(options.edit, common);
  editors::EditTransaction transaction(model);  // puts the weights back
  editors::EditContext context;
  context.seed = options.trace.trace.seed;
  context.statistics = statistics.get();
  context.transaction = &transaction;
  context.cancel = common.cancel;
  context.log = common.log;
  (void)editor->edit(model, facts.facts, context);
  evaluation::EvaluateOptions evaluate;
  evaluate.bootstrap = 0;
  evaluate.cancel = common.cancel;
  const auto after = evaluation::evaluate(model, facts, {"counterfact"}, evaluate);
  const auto& summary = after.summary["counterfact"];
  Trial trial{weight, 0,
              summary.value("efficacy_accuracy", nlohmann::json()).is_number()
                  ? summary["efficacy_accuracy"].get<double>()
                  : 0};
  trial.score = summary["score"].is_number() ? summary["score"].get<double>() : trial.efficacy;
  return trial;
}

std::vector<Trial> sweep(models::Model& model, const Options& options, const hparams::RawHparams& base,
                         const Common& common) {
  const auto facts = load_named_facts(options.edit.facts, common);
  const double width = static_cast<double>(model.edit_site(static_cast<int>(model.n_layers()) - 1).in_features);
  std::vector<Trial> trials;
  for (size_t i = 0; i < options.shares.size(); ++i) {
    common.cancel.check("suggest");
    trials.push_back(try_weight(model, facts, options, base, std::round(options.shares[i] * width), common));
    common.log.info("suggest.trial", "weight " + short_number(trials.back().weight) + " gives a score of " +
                                         short_number(trials.back().score) + " on " +
                                         std::to_string(facts.facts.size()) + " facts");
  }
  return trials;
}

/// The file's text: evidence as comments, then one line a field.
std::string to_yaml(const nlohmann::json& suggestion, const nlohmann::json& values, const std::string& model) {
  std::string text = "# Suggested by emend for " + model + ".\n";
  for (const auto& line : suggestion["why"]) text += "# " + line.get<std::string>() + "\n";
  for (const auto& [key, value] : values.items())
    if (!value.is_null()) text += key + ": " + (value.is_array() ? joined(value) : value.dump()) + "\n";
  return text;
}

int run_suggest(const Options& given, Common& common) {
  Options options = given;
  const auto known = load_traceable(options.trace, common);
  auto& trace = options.trace.trace;
  trace.kinds = {evaluation::TraceKind::kMlp};
  trace.progress = common.progress;
  trace.cancel = common.cancel;
  ModelOptions fast = options.trace.model;
  resolve_trace_dtype(fast, common);
  const auto checkpoint = open_named(fast);
  evaluation::TraceSummary summary;
  {
    const auto model = load_named(checkpoint, fast, common);
    summary = evaluation::trace_facts(model, known, trace);
  }
  if (summary.facts == 0)
    throw Error(ErrorClass::kInvalidArgument,
                {"suggest", "the model knows none of the " + std::to_string(known.size()) + " facts",
                 "known facts of which it knows some", "name other facts with --facts"});
  auto suggestion = evaluation::suggest_layers(summary, options.layers);

  auto exact = options.trace.model;
  if (exact.dtype == "auto") exact.dtype = "float32";
  auto model = load_named(checkpoint, exact, common);
  std::string note;
  auto raw = base_hparams(options, *checkpoint, model, common, note);
  raw.set("layers=" + joined(suggestion["layers"]));
  raw.set("v_loss_layer=" + std::to_string(model.n_layers() - 1));
  suggestion["why"].push_back(note + ".");
  suggestion["trials"] = nlohmann::json::array();
  if (!options.edit.facts.file.empty()) {
    const auto trials = sweep(model, options, raw, common);
    const Trial* best = &trials[0];
    std::string list;
    for (const auto& trial : trials) {
      if (trial.score > best->score) best = &trial;
      suggestion["trials"].push_back(
          {{"mom2_update_weight", trial.weight}, {"score", trial.score}, {"efficacy_accuracy", trial.efficacy}});
      list += (list.empty() ? "" : ", ") + short_number(trial.weight) + ": " + short_number(trial.score);
    }
    raw.set("mom2_update_weight=" + short_number(best->weight));
    suggestion["why"].push_back("Weight of the old keys by the score on your facts (" + list +
                                "). Judge it on others.");
  }
  const auto editor = editors::make_editor(options.editor, raw, model, common.log);
  const auto values = editor->hparams();
  const std::string yaml = to_yaml(suggestion, values, checkpoint->path().filename().string());
  if (!options.out.empty()) write_file(options.out, yaml);
  if (common.json) {
    nlohmann::ordered_json document = suggestion;
    document["editor"] = options.editor;
    document["hparams"] = values;
    document["profile"] = evaluation::to_json(summary)["effect"]["mlp"][2];
    if (!options.out.empty()) document["file"] = options.out;
    std::cout << dump_json(document) << '\n';
  } else {
    std::cout << yaml;
    if (!options.out.empty()) std::cout << "# written to " << options.out << '\n';
  }
  return 0;
}

}  // namespace

VerbRun setup_suggest(CLI::App& command) {
  auto options = std::make_shared<Options>();
  options->trace.trace.max_facts = 30;
  options->trace.trace.samples = 6;
  options->edit.facts.read.limit = 16;
  add_trace_options(command, options->trace);
  auto& edit = options->edit;
  command.add_option("--editor", options->editor, "editor that the file is for: a locate-then-edit method");
  command.add_option("--layers", options->layers, "layers to edit")->check(CLI::Range(1, 100));
  command.add_option("--out", options->out, "hyper-parameter file to write")->type_name("FILE");
  const char* group = "Sweep";
  command.add_option("--try", edit.facts.file, "facts to try weights of the old keys on; absent: none are tried")
      ->group(group)
      ->type_name("FILE");
  command.add_option("--try-limit", edit.facts.read.limit, "facts of that file")->group(group);
  command.add_option("--try-offset", edit.facts.read.offset, "facts to leave out at its start")->group(group);
  command
      .add_option("--weights", options->shares, "weights to try, as shares of the MLP's width; MEMIT's on GPT-J is 0.9")
      ->group(group)
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  command.add_option("--corpus", edit.corpus, "text or JSON lines for the key statistics")
      ->group(group)
      ->type_name("FILE");
  command.add_option("--stats-tokens", edit.stats_tokens, "tokens for the key statistics; 0: ten a key dimension")
      ->group(group);
  command.add_option("--cache", edit.metrics.cache, "folder of cached statistics")->group(group)->type_name("DIR");
  command.footer(kExamples);
  return [options](Common& common) { return run_suggest(*options, common); };
}

}  // namespace emend::tools
