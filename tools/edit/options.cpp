#include "options.h"

#include <emend/core/error.h>
#include <emend/editors/registry.h>

#include <algorithm>

#include "../compute_options.h"
#include "../statistics_options.h"

namespace emend::tools {
namespace {

void add_editor_options(CLI::App& command, EditOptions& options) {
  const char* group = "Editor";
  std::string names;
  for (const auto& editor : editors::all_editors()) names += (names.empty() ? "" : ", ") + editor.name;
  command.add_option("--editor", options.editor, "method: " + names)->group(group)->type_name("NAME");
  command
      .add_option("--hparams", options.hparams,
                  "hyper-parameters: a YAML or JSON file or a preset's name; default: the preset for the model")
      ->group(group)
      ->type_name("FILE|NAME");
  command.add_option("--set", options.set, "override one hyper-parameter, KEY=VALUE (repeatable)")
      ->group(group)
      ->type_name("KEY=VALUE");
  command
      .add_option("--batch-size", options.batch_size,
                  "facts per batch; 0: all at once where the editor is a batch editor, else one by one")
      ->group(group)
      ->check(CLI::NonNegativeNumber);
  command
      .add_option("--protocol", options.protocol,
                  "sequential (batches on the live model), or single (each batch, of one fact by default, from the "
                  "unedited model: judged at once and taken back)")
      ->group(group)
      ->check(CLI::IsMember({"sequential", "single"}));
  command.add_option("--engine", options.engine, "fast, or reference (as published: slow)")
      ->group(group)
      ->check(CLI::IsMember({"fast", "reference"}));
  command
      .add_option("--contexts", options.contexts,
                  "JSON file of context templates; default: sampled from the model with --seed")
      ->group(group)
      ->type_name("FILE");
  command.add_option("--solve-dtype", options.solve_dtype, "float64 or float32")
      ->group(group)
      ->check(CLI::IsMember({"float64", "float32"}));
  add_compute_option(command, options.compute_dtype, group);
  command.add_option("--seed", options.seed, "random seed of everything that is sampled")->group(group);
}

void add_statistics_options(CLI::App& command, EditOptions& options) {
  const char* group = "Key statistics";
  command
      .add_option("--corpus", options.corpus,
                  "text file or JSON lines with \"text\"; default: text sampled from the model itself")
      ->group(group)
      ->type_name("FILE");
  add_stats_amount_options(command, options.stats_tokens, options.stats_import, group);
  command.add_option("--stats-length", options.stats_length, "longest document in tokens")
      ->group(group)
      ->check(CLI::PositiveNumber);
  command.add_option("--stats-dtype", options.stats_dtype, "dtype of the stored moments; sums are float64")
      ->group(group)
      ->check(CLI::IsMember({"float64", "float32"}));
  command.add_option("--stats-cache", options.stats_cache, "folder of cached statistics; default: <cache>/statistics")
      ->group(group)
      ->type_name("DIR");
}

}  // namespace

bool EditOptions::saves(const std::string& what) const {
  return std::find(save.begin(), save.end(), what) != save.end();
}

void add_edit_options(CLI::App& command, EditOptions& options) {
  add_model_options(command, options.model);
  add_fact_options(command, options.facts, true);
  add_editor_options(command, options);
  add_statistics_options(command, options);
  add_metric_options(command, options.metrics);
  const char* evaluation = "Evaluation";
  command.add_option("--eval-at", options.eval_at, "when: end, each (after every batch), every=N (facts)")
      ->group(evaluation)
      ->delimiter(',')
      ->type_name("LIST");
  command.add_option("--show", options.show, "facts whose continuations are printed before and after")
      ->group(evaluation)
      ->check(CLI::NonNegativeNumber);
  const char* guards = "Guards";
  command.add_flag("--fix", options.fix, "repair facts where the remedy is clear (emend lint shows what)")
      ->group(guards);
  command
      .add_option("--on-collapse", options.on_collapse,
                  "when a batch breaks the model: warn, skip (take it back), stop (and save the rest), revert (all)")
      ->group(guards)
      ->check(CLI::IsMember({"warn", "skip", "stop", "revert"}));
  command
      .add_option("--max-divergence", options.guard.divergence,
                  "limit of KL(unedited || edited) on neutral prompts, in nat; 0: none")
      ->group(guards)
      ->check(CLI::NonNegativeNumber);
  command
      .add_option("--max-update", options.guard.relative_update,
                  "limit of a batch's update relative to its weight; 0: none")
      ->group(guards)
      ->check(CLI::NonNegativeNumber);
  command
      .add_option("--max-condition", options.guard.condition,
                  "limit of the condition number of the solved systems; 0: none")
      ->group(guards)
      ->check(CLI::NonNegativeNumber);
  const char* run = "Run";
  command.add_option("--out", options.out, "run folder; default: runs/<time>-<editor>-<model>")
      ->group(run)
      ->type_name("DIR");
  command.add_option("--save", options.save, "pack, model, gguf, peft or none")
      ->group(run)
      ->delimiter(',')
      ->type_name("LIST")
      ->check(CLI::IsMember({"pack", "model", "gguf", "peft", "none"}));
  command.add_flag("--resume", options.resume, "go on with an interrupted run in --out")->group(run);
  command.add_flag("--dry-run", options.dry_run, "check everything, show the plan, change nothing")->group(run);
  command.add_flag("--strict", options.strict, "exit with 6 if some edits failed")->group(run);
}

EvalSchedule parse_eval_at(const std::vector<std::string>& items) {
  EvalSchedule schedule;
  for (const auto& item : items) {
    if (item == "each") {
      schedule.each = true;
    } else if (item == "end") {
      schedule.end = true;
    } else if (item.rfind("every=", 0) == 0 && item.size() > 6 && item.size() < 16 &&
               item.find_first_not_of("0123456789", 6) == std::string::npos && std::stoll(item.substr(6)) > 0) {
      schedule.every = std::stoll(item.substr(6));
    } else {
      throw Error(ErrorClass::kInvalidArgument,
                  {"--eval-at", "\"" + item + "\"", "end, each or every=N with N of at least 1", ""});
    }
  }
  return schedule;
}

}  // namespace emend::tools
