// trace and suggest: which hidden states carry a model's facts, and the hyper-parameters that follow from it.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/datasets/fact.h>
#include <emend/editors/registry.h>
#include <emend/evaluation/tracing.h>
#include <emend/models/config.h>
#include <emend/models/products.h>
#include <emend/workflow/run_directory.h>
#include <emend/workflow/session.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "../options.h"

namespace emend::tools {
namespace {

using datasets::Fact;
using evaluation::TraceKind;

constexpr const char* kTraceExamples = R"(Examples:
  emend trace --limit 20 --out runs/trace                         20 of emend's facts on the default model
  emend trace --facts known_1000.json --limit 50 --out runs/trace as the ROME paper does
  emend trace --prompt "The Eiffel Tower is in" --subject "The Eiffel Tower" --out runs/eiffel
  emend trace --facts known_1000.json --kinds mlp --dtype float32 --precision 0 --json

With --out, the folder gets trace.json and trace.html. --dtype auto is bfloat16 where the processor multiplies it, else
float32: averages differ by less than the noise does.)";

constexpr const char* kSuggestExamples = R"(Examples:
  emend suggest --out smollm2.yaml                                layers, from tracing emend's own facts
  emend suggest --facts known_1000.json --limit 50 --json
  emend suggest --try mine.json --try-limit 16 --corpus wiki.jsonl --out mine.yaml
      also edits 16 of your facts with several weights of the old knowledge, and keeps the best

The file goes to memit_edit --hparams FILE. Layers end where restoring MLP outputs at the subject's last token brings
back most of the answer; the rest comes from the closest preset, or from the editor's defaults.)";

/// Which facts are traced, and how.
struct TraceSettings {
  ModelOptions model;
  std::string facts;            ///< empty: the facts that come with emend
  std::string prompt, subject;  ///< one fact instead
  evaluation::TraceOptions trace;
};

struct TraceArguments {
  TraceSettings settings;
  std::vector<std::string> kinds = {"state", "mlp", "attention"};
  std::string out;
};

struct SuggestArguments {
  TraceSettings trace;
  RunOptions edit;  // statistics and facts of the sweep
  std::string editor = "memit", out;
  int layers = 0;
  std::vector<double> shares = {0.025, 0.05, 0.1, 0.2, 0.4, 0.9};
};

void add_trace_options(Options& o, TraceSettings& settings) {
  auto& trace = settings.trace;
  settings.model.dtype = "auto";
  add_model_options(o, settings.model);
  o.group("Facts")
      .add("--facts", &settings.facts,
           "known facts (rows with subject, prompt, attribute) or any facts with an old answer; default: the facts "
           "that come with emend",
           {.type = "FILE"})
      .add("--limit", &trace.max_facts, "facts to trace, of those the model knows; -1: all", {.limits = kCountOrAll});
  o.group("Tracing")
      .add("--samples", &trace.samples, "noise draws at most", {.limits = {1, 10000}})
      .add("--precision", &trace.precision,
           "a state gets no more draws once its standard error is below; 0: always all", {.limits = kNonNegative})
      .add("--window", &trace.window, "layers restored together for MLP and attention", {.limits = {1, 10000}})
      .add("--noise", &trace.noise_multiple, "noise in standard deviations of the subjects' embeddings",
           {.limits = kPositive})
      .add("--batch-tokens", &trace.batch_tokens, "tokens of a forward pass", {.limits = kPositive})
      .add("--seed", &trace.seed, "random seed");
}

/// The facts that say what the model is believed to know.
std::vector<Fact> with_old_answers(datasets::FactSet set, const std::string& name) {
  std::erase_if(set.facts, [](const Fact& fact) { return !fact.target_true; });
  if (set.facts.empty())
    refuse({name, "no fact says what the model is believed to know",
            "rows with \"attribute\" (known facts) or \"target_true\"", "give known facts, or --prompt and --subject"});
  return std::move(set.facts);
}

void require_some(const char* option, int64_t limit) {
  if (limit == 0) refuse({option, "0", "1 or more, or -1 for all", ""});
}

/// Known facts of a file: rows with prompt, subject and attribute, or any facts format with an old answer.
std::vector<Fact> load_traceable(const TraceSettings& settings, const Common& common) {
  require_some("--limit", settings.trace.max_facts);
  if (!settings.prompt.empty() || !settings.subject.empty()) {
    Fact one;
    one.subject = settings.subject;
    one.prompt = datasets::with_slot(settings.prompt, one.subject);
    if (one.subject.empty()) refuse({"--subject", "nothing", "words of --prompt, or what {} stands for there", ""});
    if (one.prompt.find("{}") == std::string::npos)
      refuse({"--subject", "\"" + one.subject + "\", which is not in \"" + shorten(one.prompt, 60) + "\"",
              "words of --prompt, or {} in their place", ""});
    return {one};
  }
  if (settings.facts.empty())
    return with_old_answers(datasets::load_bundled_facts({}, common.log), "emend's own facts");
  const auto text = read_file(settings.facts);
  const bool known_form = text.substr(0, 65536).find("\"attribute\"") != std::string::npos;
  auto facts = known_form ? datasets::parse_known_facts(text, settings.facts)
                          : with_old_answers(datasets::load_facts(settings.facts, {}, common.log), settings.facts);
  common.log.info("facts.loaded", counted(facts.size(), "known fact") + " from " + settings.facts);
  return facts;
}

/// The dtype that "auto" means: bfloat16 where the processor multiplies it, else float32.
void resolve_trace_dtype(ModelOptions& model, const Common& common) {
  if (model.dtype != "auto") return;
  model.dtype = models::multiplies_bfloat16(c10::kCPU) ? "bfloat16" : "float32";
  if (model.dtype == "bfloat16")
    common.log.info("trace.dtype", "tracing in bfloat16; --dtype float32 is exact and slower");
}

std::vector<TraceKind> parse_kinds(const std::vector<std::string>& names) {
  std::vector<TraceKind> kinds;
  for (const auto& name : names)
    for (TraceKind kind : {TraceKind::kState, TraceKind::kMlp, TraceKind::kAttention})
      if (name == evaluation::to_string(kind) && std::ranges::find(kinds, kind) == kinds.end()) kinds.push_back(kind);
  return kinds;
}

std::string summary_text(const evaluation::TraceSummary& summary, double seconds) {
  std::string text = formatted(
      "%s traced in %.1f s%s\n"
      "probability of the answer: %.3f clean, %.3f with a noised subject\n",
      counted(static_cast<size_t>(summary.facts), "fact").c_str(), seconds,
      summary.skipped > 0
          ? formatted(", %lld more are not known to the model", static_cast<long long>(summary.skipped)).c_str()
          : "",
      summary.clean, summary.corrupted);
  for (const auto& [kind, effect] : summary.effect) {
    text += "\n" +
            (kind == TraceKind::kState
                 ? "restoring single states"
                 : std::string("restoring ") + (kind == TraceKind::kMlp ? "MLP" : "attention") + " outputs of " +
                       counted(std::min(summary.window, summary.n_layers), "layer")) +
            ": layer with the largest effect\n";
    for (size_t row = 0; row < effect.size(); ++row) {
      const auto best = std::ranges::max_element(effect[row]);
      if (*best == *best)
        text += formatted("  %-24s %4lld  %+.3f\n", summary.rows[row].c_str(),
                          static_cast<long long>(best - effect[row].begin()), *best);
    }
  }
  return text;
}

int run_trace(const TraceArguments& options, const Common& common) {
  auto settings = options.settings;
  const auto facts = load_traceable(settings, common);
  std::optional<workflow::RunDirectory> folder;
  if (!options.out.empty()) {
    require_new((std::filesystem::path(options.out) / "trace.json").string(), false);
    folder.emplace(options.out, workflow::Earlier::kAny);
  }
  resolve_trace_dtype(settings.model, common);
  const auto checkpoint = open_named(settings.model);
  workflow::warn_of_edits_beside(*checkpoint, "trace.runtime", common.log);
  const auto model = load_named(checkpoint, settings.model, common);
  settings.trace.kinds = parse_kinds(options.kinds);
  settings.trace.any_answer = !settings.prompt.empty();
  settings.trace.progress = common.progress;
  settings.trace.cancel = common.cancel;
  const auto begin = std::chrono::steady_clock::now();
  const auto summary = evaluation::trace_facts(model, facts, settings.trace);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (summary.facts == 0)
    refuse({"trace", "the model knows none of the " + std::to_string(facts.size()) + " facts",
            "known facts of which it knows some", "name other facts with --facts, or a prompt with --prompt"});
  nlohmann::ordered_json document = evaluation::to_json(summary);
  document["model"] = model.checkpoint().path().string();
  document["dtype"] = settings.model.dtype;
  document["seed"] = settings.trace.seed;
  document["seconds"] = seconds;
  const bool suggests = summary.effect.count(TraceKind::kMlp) > 0;
  if (suggests) document["suggested"] = evaluation::suggest_layers(summary);
  if (folder) {
    folder->write_json("trace.json", document);
    write_file(*folder / "trace.html", evaluation::trace_page(summary, workflow::short_model_name(model.checkpoint())));
  }
  std::string text = summary_text(summary, seconds);
  if (suggests) {
    const auto& suggested = document["suggested"];
    const auto caveat = suggested["caveat"].get<std::string>();
    text += "\nlayers to edit: " + suggested["layers"].dump() + "\n" + (caveat.empty() ? "" : caveat + "\n");
  }
  if (folder) text += "\nheat maps: " + (*folder / "trace.html").string() + "\n";
  common.print(document, text);
  return 0;
}

std::string bracketed(const nlohmann::json& layers) {
  return "[" + join(layers, ", ", [](const nlohmann::json& layer) { return layer.dump(); }) + "]";
}

std::string four_digits(double value) {
  return formatted("%.4g", value);
}

/// The closest preset's values, or none; `note` says which.
hparams::RawHparams base_hparams(const SuggestArguments& options, const models::Checkpoint& checkpoint,
                                 const models::Model& model, const Common& common, std::string& note) {
  try {
    auto raw = workflow::find_hparams(options.editor, "", {}, checkpoint, common.log);
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

Trial try_weight(models::Model& model, const datasets::FactSet& facts, const SuggestArguments& options,
                 const hparams::RawHparams& base, double weight, const Common& common) {
  auto raw = base;
  raw.set("mom2_update_weight=" + four_digits(weight));
  const auto statistics = workflow::statistics_provider(options.edit, common);
  workflow::Handles lent = common;
  lent.progress = {};
  lent.statistics = statistics.get();
  workflow::Session session(model, editors::make_editor(options.editor, raw, model, common.log),
                            {.seed = options.trace.trace.seed, .watch = false}, lent);
  (void)session.edit(facts.facts);
  const auto after = evaluation::evaluate(model, facts, {"counterfact"}, {.bootstrap = 0, .cancel = common.cancel});
  session.undo();
  const auto& summary = after.summary["counterfact"];
  Trial trial{weight, 0,
              summary.value("efficacy_accuracy", nlohmann::json()).is_number()
                  ? summary["efficacy_accuracy"].get<double>()
                  : 0};
  trial.score = summary["score"].is_number() ? summary["score"].get<double>() : trial.efficacy;
  return trial;
}

std::vector<Trial> sweep(models::Model& model, const SuggestArguments& options, const hparams::RawHparams& base,
                         const Common& common) {
  const auto facts = workflow::load_named_facts(options.edit.facts, common);
  const double width = static_cast<double>(model.edit_site(static_cast<int>(model.n_layers()) - 1).in_features);
  std::vector<Trial> trials;
  for (size_t i = 0; i < options.shares.size(); ++i) {
    common.cancel.check("suggest");
    const double weight = std::max(1.0, std::round(options.shares[i] * width));
    trials.push_back(try_weight(model, facts, options, base, weight, common));
    common.log.info("suggest.trial", "weight " + four_digits(trials.back().weight) + " gives a score of " +
                                         four_digits(trials.back().score) + " on " +
                                         counted(facts.facts.size(), "fact"));
  }
  return trials;
}

/// The file's text: evidence as comments, then one line a field.
std::string to_yaml(const nlohmann::json& suggestion, const nlohmann::json& values, const std::string& model,
                    const std::string& editor) {
  std::string text = "# Suggested by emend for " + model + ".\n";
  for (const auto& line : suggestion["why"]) text += "# " + line.get<std::string>() + "\n";
  text += "alg_name: " + editor + "\n";
  for (const auto& [key, value] : values.items())
    if (!value.is_null()) text += key + ": " + (value.is_array() ? bracketed(value) : value.dump()) + "\n";
  return text;
}

/// How many layers: those asked for, else as many as the editor's preset has.
int layers_of(const SuggestArguments& options, const hparams::RawHparams& raw) {
  if (options.layers > 0) return options.layers;
  const auto& editor = editors::find_editor(options.editor);
  if (raw.find("layers")) return static_cast<int>(editor.effective(raw, {}).at("layers").size());
  return editor.batch ? 5 : 1;  // ROME's rank-one change is of one layer
}

/// Editors that have no use for layers that end at a peak, or for weights of old keys.
void require_fields(const SuggestArguments& options) {
  const auto fields = editors::find_editor(options.editor).fields();
  std::vector<const char*> needed = {"layers", "v_loss_layer"};
  if (!options.edit.facts.file.empty()) needed.push_back("mom2_update_weight");
  for (const char* name : needed)
    if (std::ranges::find(fields, name, &hparams::FieldInfo::name) == fields.end())
      refuse({"--editor", options.editor + ", which has no " + name, "an editor that locates, then edits",
              name == needed.back() && needed.size() > 2 ? "leave out --try" : "memit, for one"});
}

int run_suggest(const SuggestArguments& given, Common& common) {
  SuggestArguments options = given;
  require_fields(options);
  require_some("--try-limit", options.edit.facts.read.limit);
  if (!options.out.empty()) require_new(options.out, false);
  const auto known = load_traceable(options.trace, common);
  auto& trace = options.trace.trace;
  trace.kinds = {evaluation::TraceKind::kMlp};
  trace.progress = common.progress;
  trace.cancel = common.cancel;
  ModelOptions fast = options.trace.model;
  resolve_trace_dtype(fast, common);
  const auto checkpoint = open_named(fast);
  workflow::warn_of_edits_beside(*checkpoint, "suggest.runtime", common.log);
  const auto layers = models::parse_config(checkpoint->config(), checkpoint->path().string()).n_layers;
  if (options.layers > layers)
    refuse({"--layers", std::to_string(options.layers), "1 to " + std::to_string(layers),
            "the model has " + counted(layers, "layer")});
  evaluation::TraceSummary summary;
  {
    const auto model = load_named(checkpoint, fast, common);
    summary = evaluation::trace_facts(model, known, trace);
  }
  if (summary.facts == 0)
    refuse({"suggest", "the model knows none of the " + std::to_string(known.size()) + " facts",
            "known facts of which it knows some", "name other facts with --facts"});
  auto exact = options.trace.model;
  if (exact.dtype == "auto") exact.dtype = "float32";
  auto model = load_named(checkpoint, exact, common);
  std::string note;
  auto raw = base_hparams(options, *checkpoint, model, common, note);
  auto suggestion = evaluation::suggest_layers(summary, layers_of(options, raw));
  if (suggestion["effect"] <= 0)
    common.log.warning(
        "suggest.nothing",
        "no layer's MLP output brings anything of the answers back: these layers say nothing; trace more "
        "facts that the model knows, or with another window or noise");
  raw.set("layers=" + bracketed(suggestion["layers"]));
  raw.set("v_loss_layer=" + std::to_string(model.n_layers() - 1));
  suggestion["why"].push_back(note + ".");
  suggestion["trials"] = nlohmann::json::array();
  if (!options.edit.facts.file.empty()) {
    const auto trials = sweep(model, options, raw, common);
    const Trial* best = &trials[0];
    for (const auto& trial : trials) {
      // Of equals the one that spares most of what the model knows.
      if (std::pair(trial.score, trial.weight) > std::pair(best->score, best->weight)) best = &trial;
      suggestion["trials"].push_back(
          {{"mom2_update_weight", trial.weight}, {"score", trial.score}, {"efficacy_accuracy", trial.efficacy}});
    }
    const auto list = join(
        trials, ", ", [](const Trial& trial) { return four_digits(trial.weight) + ": " + four_digits(trial.score); });
    if (best->score > 0) raw.set("mom2_update_weight=" + four_digits(best->weight));
    suggestion["why"].push_back((best->score > 0 ? "Weight of the old keys by the score on your facts ("
                                                 : "No weight of the old keys was tried with success (") +
                                list + "). Judge it on others.");
  }
  const auto editor = editors::make_editor(options.editor, raw, model, common.log);
  const auto values = editor->hparams();
  const std::string yaml = to_yaml(suggestion, values, workflow::short_model_name(*checkpoint), options.editor);
  if (!options.out.empty()) write_file(options.out, yaml);
  nlohmann::ordered_json document = suggestion;
  document["editor"] = options.editor;
  document["hparams"] = values;
  document["profile"] = evaluation::to_json(summary)["effect"]["mlp"][2];
  if (!options.out.empty()) document["file"] = options.out;
  common.print(document, yaml + (options.out.empty() ? "" : "# written to " + options.out + "\n"));
  return 0;
}

}  // namespace

VerbRun setup_trace(Options& o) {
  auto& options = o.arguments<TraceArguments>();
  auto& settings = options.settings;
  settings.trace.max_facts = 50;
  add_trace_options(o, settings);
  o.group("Facts")
      .add("--prompt", &settings.prompt, "trace one prompt, whatever the model answers; {} stands for the subject",
           {.type = "TEXT", .needs = "--subject"})
      .add("--subject", &settings.subject, "its subject", {.type = "TEXT", .needs = "--prompt"});
  for (const char* other : {"--facts", "--limit"}) o.at(other).excludes = "--prompt";
  o.group("Tracing").add("--kinds", &options.kinds, "what to restore: state, mlp, attention",
                         {.choices = {"state", "mlp", "attention"}, .list = true});
  o.add("--out", &options.out, "folder for trace.json and trace.html, the heat maps", {.type = "DIR"});
  o.footer = kTraceExamples;
  return [&options](Common& common) { return run_trace(options, common); };
}

VerbRun setup_suggest(Options& o) {
  auto& options = o.arguments<SuggestArguments>();
  auto& edit = options.edit;
  options.trace.trace.max_facts = 30;
  options.trace.trace.samples = 6;
  edit.facts.read.limit = 16;
  add_trace_options(o, options.trace);
  o.add("--editor", &options.editor, "editor that the file is for: a locate-then-edit method")
      .add("--layers", &options.layers, "layers to edit; 0: as many as the editor's preset has", {.limits = {0, 100}})
      .add("--out", &options.out, "hyper-parameter file to write", {.type = "FILE"});
  o.group("Sweep")
      .add("--try", &edit.facts.file, "facts to try weights of the old keys on; absent: none are tried",
           {.type = "FILE"})
      .add("--try-limit", &edit.facts.read.limit, "facts of that file", {.limits = kCountOrAll, .needs = "--try"})
      .add("--try-offset", &edit.facts.read.offset, "facts to leave out at its start",
           {.limits = kNonNegative, .needs = "--try"})
      .add("--weights", &options.shares, "weights to try, as shares of the MLP's width; MEMIT's on GPT-J is 0.9",
           {.limits = kPositive, .list = true, .needs = "--try"})
      .add("--corpus", &edit.corpus, "text or JSON lines for the key statistics", {.type = "FILE", .needs = "--try"})
      .add("--stats-tokens", &edit.stats_tokens, "tokens for the key statistics; 0: ten a key dimension",
           {.limits = kNonNegative, .needs = "--try"});
  add_cache_option(o.group(""), edit.metrics.cache, "folder of cached statistics");
  o.footer = kSuggestExamples;
  return [&options](Common& common) { return run_suggest(options, common); };
}

}  // namespace emend::tools
