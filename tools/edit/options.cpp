#include "options.h"

#include <emend/core/text.h>
#include <emend/core/text_table.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/statistics.h>
#include <emend/workflow/save_formats.h>

namespace emend::tools {
namespace {

void add_editor_options(Options& o, RunOptions& options) {
  o.group("Editor")
      .add("--editor", &options.editor, "method: " + join(editors::all_editors(), ", ", &editors::EditorInfo::name),
           {.type = "NAME",
            .shown = "alg_name of --hparams; else latch where it has a preset for the model, else memit"})
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
  add_compute_option(o.group("Editor"), options.compute_dtype);
  o.group("Editor").add("--seed", &options.seed, "random seed of everything that is sampled");
}

void add_statistics_options(Options& o, RunOptions& options) {
  o.group("Key statistics")
      .add("--corpus", &options.corpus,
           "text file or JSON lines with \"text\"; default: text sampled from the model itself", {.type = "FILE"});
  add_stats_amount_options(o.group("Key statistics"), options);
  o.group("Key statistics")
      .add("--stats-length", &options.stats_length, "longest document in tokens", {.limits = kPositive})
      .add("--stats-dtype", &options.stats_dtype, "dtype of the stored moments; sums are float64",
           {.choices = {"float64", "float32"}})
      .add("--stats-cache", &options.stats_cache, "folder of cached statistics; default: <cache>/statistics",
           {.type = "DIR"});
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
           {.type = "N|auto"})
      .add("--stats-import", &options.stats_import,
           "published statistics instead: .npz files as the MEMIT repository has them, {layer} standing for the layer",
           {.type = "PATTERN"});
}

void add_method_options(Options& o, RunOptions& options) {
  add_editor_options(o, options);
  add_statistics_options(o, options);
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
  std::vector<std::string> forms;
  for (const auto& format : workflow::save_formats()) forms.push_back(format.name);
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
           "go on with the interrupted run in --out; all other options are those that it began with")
      .add("--dry-run", &options.dry_run, "check everything, show the plan, change nothing")
      .add("--strict", &options.strict, "exit with 6 unless the model says every fact in the end")
      .add("--min-said", &options.min_said, "exit with 6 if the model says a smaller share of the facts",
           {.type = "PERCENT"});
}

}  // namespace emend::tools
