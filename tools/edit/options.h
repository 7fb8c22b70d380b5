// Everything that `memit_edit` can be told.
#pragma once

#include <emend/evaluation/collapse_guard.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "../fact_options.h"
#include "../model_options.h"

namespace emend::tools {

struct EditOptions {
  ModelOptions model;
  FactOptions facts;
  MetricOptions metrics;

  std::string editor = "memit";
  std::string hparams;           ///< file or preset name; empty: the preset for the model
  std::vector<std::string> set;  ///< KEY=VALUE
  int64_t batch_size = 0;        ///< 0: all at once where the editor is a batch editor, else 1
  std::string engine = "fast";
  std::string contexts;  ///< JSON file of context templates; empty: sampled from the model
  std::string solve_dtype = "float64";
  std::string compute_dtype = "float32";
  uint64_t seed = 0;

  std::string corpus;
  int64_t stats_tokens = 0;  ///< 0: ten a key dimension
  int64_t stats_length = 512;
  std::string stats_import;  ///< pattern of published .npz files; empty: none
  std::string stats_dtype = "float64";
  std::string stats_cache;  ///< empty: "<cache>/statistics"

  bool fix = false;                  ///< apply the linter's clear fixes to the facts
  std::string on_collapse = "warn";  ///< warn, skip, stop or revert
  evaluation::GuardLimits guard;

  std::string protocol = "sequential";  ///< or single: every batch starts from the unedited model
  std::vector<std::string> eval_at = {"end"};
  int64_t show = 5;  ///< continuations to print

  std::string out;
  std::vector<std::string> save = {"pack"};
  bool resume = false, dry_run = false, strict = false;

  [[nodiscard]] bool single() const { return protocol == "single"; }
  [[nodiscard]] bool saves(const std::string& what) const;
};

void add_edit_options(CLI::App& command, EditOptions& options);

/// When to evaluate: after every batch, every N facts, at the end.
struct EvalSchedule {
  bool each = false, end = false;
  int64_t every = 0;
};
/// Throws Error(kInvalidArgument) naming --eval-at.
[[nodiscard]] EvalSchedule parse_eval_at(const std::vector<std::string>& items);

}  // namespace emend::tools
