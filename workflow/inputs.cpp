#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/hparams/machine.h>
#include <emend/hparams/preset.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/inputs.h>

#include <algorithm>

namespace emend::workflow {
namespace {

hparams::ModelHints hints_of(const models::Checkpoint& checkpoint) {
  hparams::ModelHints hints;
  hints.names = {checkpoint.path().string(), checkpoint.path().filename().string()};
  for (const char* key : {"_name_or_path", "name", "general.name"})
    if (const auto it = checkpoint.config().find(key); it != checkpoint.config().end() && it->is_string())
      hints.names.push_back(it->get<std::string>());
  try {
    const auto config = models::parse_config(checkpoint.config(), checkpoint.path().string());
    hints.family = config.family;
    hints.n_layers = config.n_layers;
    hints.hidden = config.hidden_size;
    for (const auto& preset : hparams::all_presets())  // another width may be one of these with neurons more
      if (const auto& known = preset.model; known && known->family == hints.family && known->layers == hints.n_layers &&
                                            known->hidden == hints.hidden && known->mlp == config.mlp_width)
        hints.mlp = known->mlp;
  } catch (const Error&) {  // said where the model is loaded; a family of the caller's own has its names alone
  }
  return hints;
}

std::string preset_list(const std::string& editor) {
  std::string names;
  for (const auto& preset : hparams::all_presets())
    if (preset.editor == editor) append_item(names, preset.name);
  return names.empty() ? "none" : names;
}

constexpr size_t kShown = 10;    // findings printed one by one
constexpr size_t kAsked = 1000;  // facts that the model is asked about: each costs a forward pass

// A target that the model gives already needs no edit, and an edit towards it measures nothing. Of long lists the first
// kAsked facts are looked at.
std::vector<datasets::Finding> already_known(const datasets::FactSet& facts, const models::Model& model,
                                             const Handles& lent) {
  std::vector<datasets::Finding> findings;
  if (facts.facts.empty()) return findings;
  const size_t asked = std::min(facts.facts.size(), kAsked);
  const auto efficacy =
      evaluation::evaluate_efficacy(model, {facts.facts.begin(), facts.facts.begin() + asked},
                                    {.progress = lent.progress, .cancel = lent.cancel, .sharing = lent.sharing});
  for (size_t i = 0; i < efficacy.size(); ++i) {
    if (!efficacy[i].accurate) continue;
    findings.push_back({datasets::Severity::kNote,
                        "already-known",
                        i,
                        facts.facts[i].where(),
                        "the model already answers \"" + facts.facts[i].target_new + "\"; leave the fact out",
                        {},
                        /*remove=*/true});
  }
  return findings;
}

// `together`: of contradictions that the data set intends, which are to be edited one after the other.
void log_findings(const std::vector<datasets::Finding>& findings, bool together, const Handles& lent) {
  const auto shown = [&](const datasets::Finding& finding) {
    if (finding.check == "unread-key") return false;  // told as the file is read
    return finding.severity != datasets::Severity::kNote || (together && finding.check == "contradiction");
  };
  size_t seen = 0;
  for (const auto& finding : findings)
    if (shown(finding) && seen++ < kShown)
      lent.log.warning("facts.lint", finding.where + ": " + finding.text + " [" + finding.check + "]");
  if (seen > kShown)
    lent.log.warning("facts.lint",
                     std::to_string(seen - kShown) + " more remarks about the facts; emend lint lists them all");
}

// The rule of emend lint. A contradiction may be meant; one batch then averages its answers, several write the last, as
// a long sequence of corrections does.
void refuse_errors(const std::vector<datasets::Finding>& findings, const RunOptions& options) {
  std::vector<const datasets::Finding*> errors;
  for (const auto& finding : findings)
    if (const bool apart =
            options.allow_conflicts || options.lifelong() || (options.single() && options.batch_size <= 1);
        finding.severity == datasets::Severity::kError && !(options.fix && finding.fixable()) &&
        !(apart && finding.check == "contradiction"))
      errors.push_back(&finding);
  if (errors.empty()) return;
  const std::string more =
      errors.size() == 1 ? "" : " (and " + counted(errors.size() - 1, "other error") + " in the facts)";
  throw Error(ErrorClass::kCorruption,
              {errors[0]->where, errors[0]->text + more,
               errors[0]->check == "contradiction" ? "facts that can be true together" : "facts without errors",
               "emend lint shows all" + (errors[0]->check == "contradiction"
                                             ? "; " + setting("allow_conflicts") + " edits them all the same"
                                             : "")});
}

}  // namespace

void refuse_contradictions(const datasets::FactSet& facts, const RunOptions& options) {
  refuse_errors(datasets::lint_facts(facts), options);
}

ProgressFn stopping(std::function<bool(const ProgressUpdate&)> go_on) {
  if (!go_on) return {};
  return [go_on = std::move(go_on)](const ProgressUpdate& update) {
    if (!go_on(update))
      throw Error(ErrorClass::kCancelled, {update.phase, "stopped by the progress callback", "", "call it again"});
  };
}

datasets::FactSet load_named_facts(const FactOptions& options, const Handles& lent) {
  auto facts = datasets::load_facts(options.file, options.read, lent.log);
  if (facts.facts.empty())
    refuse({options.file, "no facts to work on", "at least one usable row",
            "check the file, " + setting("offset") + " and " + setting("limit")});
  lent.log.event(LogLevel::kInfo, "facts.loaded",
                 counted(facts.facts.size(), "fact") + " from " + options.file + " (" + facts.format + ")",
                 {{"file", options.file},
                  {"format", facts.format},
                  {"facts", facts.facts.size()},
                  {"skipped", facts.skipped.size()}});
  return facts;
}

static void warn_of_long(const datasets::FactSet& facts, const models::Model& model, const Log& log) {
  if (!model.config().long_text_is_noise()) return;
  size_t many = 0, longest = 0;
  for (const auto& fact : facts.facts) {
    const size_t tokens = model.tokenizer().encode_ids(fact.full_prompt() + " " + fact.target_new, true).size();
    if (static_cast<int64_t>(tokens) > model.max_positions()) ++many, longest = std::max(longest, tokens);
  }
  if (many > 0)
    log.warning("facts.window", counted(many, "fact") + " of up to " + std::to_string(longest) +
                                    " tokens: the model was made for " + std::to_string(model.max_positions()) +
                                    ", and what comes behind them is noise to it");
}

datasets::FactSet check_request(datasets::FactSet facts, const models::Model& model, const RunOptions& options,
                                const Handles& lent, std::vector<datasets::Finding>& findings) {
  findings = datasets::lint_facts(facts, already_known(facts, model, lent));
  const bool alone = options.batch_size == 0 && (options.single() || !chosen_editor(options).batch);
  log_findings(findings, !alone && options.batch_size != 1, lent);
  warn_of_long(facts, model, lent.log);
  refuse_errors(findings, options);
  if (!options.fix) return facts;
  size_t applied = 0;
  auto fixed = datasets::fix_facts(std::move(facts), findings, &applied);
  if (applied > 0)
    lent.log.info("facts.fix",
                  "fixes applied: " + std::to_string(applied) + ", " + counted(fixed.facts.size(), "fact") + " left");
  if (fixed.facts.empty())
    throw Error(ErrorClass::kCorruption,
                {options.facts.file, "no fact is left after " + setting("fix"), "at least one", ""});
  return fixed;
}

int64_t pass_tokens(const models::ModelConfig& config, const std::vector<c10::Device>& layers, size_t element_bytes,
                    const std::vector<devices::DeviceInfo>& machine) {
  int64_t tokens = 8 * kPassTokens;
  for (const auto& info : machine) {
    const auto own = std::ranges::count(layers, info.device);
    if (own > 0 && !info.device.is_cuda()) return kPassTokens;
    // Of a token a layer's activations, and keys and values of the beginnings that four tokens share.
    const int64_t numbers =
        8 * config.hidden_size + 4 * config.mlp_width + 4 * own * 2 * config.n_kv_heads * config.head_dim;
    if (own > 0) tokens = std::min(tokens, info.free_bytes / 8 / (numbers * static_cast<int64_t>(element_bytes)));
  }
  return std::max(tokens, kPassTokens);
}

std::vector<std::string> metric_names(const MetricOptions& options, const datasets::FactSet& facts, bool alone) {
  auto names = evaluation::resolve_metrics(options.names, facts);
  const bool there = std::ranges::find(names, "generation") != names.end();
  if (options.generation && !alone && !there && !names.empty()) names.emplace_back("generation");
  return names;
}

evaluation::EvaluateOptions evaluate_options(const models::Model& model, const MetricOptions& options,
                                             const Handles& lent, uint64_t seed) {
  evaluation::EvaluateOptions evaluate;
  evaluate.batch_tokens = options.batch_tokens;
  if (options.batch_tokens == 0)
    evaluate.batch_tokens = pass_tokens(model.config(), model.placement().layers, c10::elementSize(model.dtype()),
                                        devices::visible_devices());
  evaluate.reference = options.engine == "reference";
  evaluate.generation = options.generation;
  evaluate.snippets = options.snippets;
  evaluate.idf_corpus = options.idf_corpus;
  evaluate.health_data = options.health_data;
  evaluate.health_limit = options.health_limit;
  evaluate.free_limit = options.free_limit;
  evaluate.free_style = options.free_style;
  evaluate.seed = seed;
  evaluate.progress = lent.progress;
  evaluate.cancel = lent.cancel;
  evaluate.log = lent.log;
  evaluate.sharing = lent.sharing;
  return evaluate;
}

models::PlaceOptions place_options(const ModelOptions& options, const Log& log) {
  return {options.device_map, options.max_memory, parse_dtype(options.dtype, "dtype"), log};
}

const editors::EditorInfo& chosen_editor(const RunOptions& options, const models::Checkpoint* checkpoint) {
  std::string named;
  std::error_code failure;
  if (std::filesystem::is_regular_file(options.hparams, failure))
    named = hparams::machine_settings(hparams::load_hparams(options.hparams)).alg_name.value_or("");
  if (options.editor.empty() && named.empty()) {
    const bool known = checkpoint && options.hparams.empty() && hparams::find_preset("latch", hints_of(*checkpoint));
    return editors::find_editor(known ? "latch" : "memit");
  }
  if (named.empty()) return editors::find_editor(options.editor);
  const auto same = [&](const std::string& name) { return hparams::same_editor(named, name); };
  if (options.editor.empty()) {
    for (const auto& editor : editors::all_editors())
      if (same(editor.name)) return editor;
    refuse({options.hparams, "alg_name: " + named,
            "one of " + join(editors::all_editors(), ", ", &editors::EditorInfo::name),
            "take alg_name out of the file and choose one with " + setting("editor")});
  }
  const auto& given = editors::find_editor(options.editor);
  if (!same(given.name) && !same(given.name.substr(0, given.name.rfind('-'))))
    refuse({options.hparams, "alg_name: " + named + ", with " + setting("editor", given.name), "one editor",
            "leave " + setting("editor") + " out, or name another file with " + setting("hparams")});
  return given;
}

const std::string& chosen_arithmetic(const RunOptions& options, const editors::EditorInfo& editor) {
  return options.compute_dtype.empty() ? editor.compute_dtype : options.compute_dtype;
}

hparams::RawHparams find_hparams(const std::string& editor, const std::string& file_or_name,
                                 const std::vector<std::string>& set, const models::Checkpoint& checkpoint,
                                 const Log& log) {
  hparams::RawHparams raw;
  if (!file_or_name.empty()) {
    raw = hparams::load_file_or_preset(editor, file_or_name);
  } else if (const auto* preset = hparams::find_preset(editor, hints_of(checkpoint))) {
    raw = preset->values;
    log.info("hparams.preset", "hyper-parameters from the preset " + preset->name + " of " + preset->path);
  } else {
    throw Error(ErrorClass::kNotFound,
                {setting("hparams"), "no preset of " + editor + " fits this model",
                 "one of the presets: " + preset_list(editor),
                 "name a preset or a file with " + setting("hparams") +
                     (editors::find_editor(editor).solves() ? "; emend suggest makes one for a new model" : "")});
  }
  for (const auto& assignment : set) raw.set(assignment);
  return raw;
}

std::optional<editors::ContextTemplates> named_contexts(const RunOptions& options) {
  if (options.templates || options.contexts.empty()) return options.templates;
  const JsonRules rules{.error_class = ErrorClass::kInvalidArgument,
                        .expected = "a list of context templates, or a list of lists",
                        .advice = ""};
  return editors::parse_contexts(read_json(options.contexts, rules), options.contexts);
}

void require_same(const devices::WorkSharing& sharing, const nlohmann::json& settings) {
  if (sharing.alone()) return;
  const auto text = [](const nlohmann::json& value) {
    return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  };
  const auto all = sharing.exchange([&] { return text(settings); });
  const auto first = nlohmann::json::parse(all[0]);
  for (size_t r = 1; r < all.size(); ++r) {
    const auto other = nlohmann::json::parse(all[r]);
    for (const auto& [key, value] : first.items())
      if (other.value(key, nlohmann::json()) != value)
        refuse({setting(key),
                shorten(text(other.value(key, nlohmann::json())), 100) + " in process " + std::to_string(r) + " and " +
                    shorten(text(value), 100) + " in process 0",
                "the same in all processes", "start all of them with the same command"});
  }
}

nlohmann::json statistics_settings(const RunOptions& options) {
  std::error_code failure;
  const auto size = std::filesystem::file_size(options.corpus, failure);
  return {{"corpus", options.corpus},
          {"corpus_size", failure ? 0 : size},
          {"stats_tokens", options.stats_tokens},
          {"stats_import", options.stats_import},
          {"stats_length", options.stats_length},
          {"stats_dtype", options.stats_dtype},
          {"seed", options.seed}};
}

std::unique_ptr<editors::StatisticsProvider> statistics_provider(const RunOptions& options, const Handles& lent,
                                                                 bool cache_is_output) {
  if (!options.stats_import.empty()) return editors::make_published_statistics(options.stats_import, lent.log);
  editors::StatisticsOptions statistics;
  statistics.tokens = options.stats_tokens;
  statistics.max_length = options.stats_length;
  statistics.dtype = parse_dtype(options.stats_dtype, "stats_dtype");
  statistics.seed = options.seed;
  statistics.cache = options.stats_cache;
  if (options.stats_cache.empty() && !options.metrics.cache.empty())
    statistics.cache = std::filesystem::path(options.metrics.cache) / "statistics";
  statistics.cache_is_output = cache_is_output;
  statistics.cancel = lent.cancel;
  statistics.progress = lent.progress;
  statistics.log = lent.log;
  std::optional<editors::StatisticsText> text;
  if (!options.corpus.empty()) text = editors::StatisticsText::from_file(options.corpus);
  return std::make_unique<editors::CorpusStatistics>(std::move(text), std::move(statistics), lent.sharing.group());
}

std::string short_model_name(const models::Checkpoint& checkpoint) {
  const std::string name = models::model_name(checkpoint.path());
  return name.substr(name.rfind('/') + 1);
}

}  // namespace emend::workflow
