// What a run has gathered by its end, typed; documents.h makes files of it.
#pragma once

#include <emend/datasets/lint.h>
#include <emend/editors/editor.h>
#include <emend/evaluation/collapse_guard.h>
#include <emend/evaluation/evaluation.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace emend::workflow {

/// A batch that is finished is the result of its edit. One without outcomes is the editor's correction after the last
/// batch: it has no facts.
using Batch = editors::EditResult;

/// Share of the facts edited so far that the model answers as asked, in percent.
struct EfficacyStep {
  int64_t edits = 0;
  double efficacy_success = 0;
};

/// What was measured between batches.
struct Measured {
  std::vector<EfficacyStep> efficacy;
  evaluation::RetentionMatrix retention;
};

struct RunRecord {
  std::string editor, model_path, out;
  std::string compute_dtype;  ///< of the frozen layers while targets were optimised
  nlohmann::json hparams;
  std::vector<std::string> command_line;
  std::vector<std::string> metrics;  ///< names of the families
  std::optional<evaluation::Evaluation> before, after;
  std::vector<evaluation::Continuation> text_before, text_after;  ///< of the first facts
  std::vector<Batch> batches;
  Measured measured;
  std::vector<datasets::Finding> findings;      ///< of the linter, about the facts as given
  std::vector<evaluation::GuardReading> guard;  ///< one a batch
  nlohmann::json statistics;                    ///< StatisticsProvider::describe()
  nlohmann::json transfers;
  std::map<std::string, double> seconds;  ///< a phase
  std::vector<std::string> weights_changed;
  std::map<std::string, std::string> files;  ///< what → path, in the order to print
  int64_t failed = 0;                        ///< facts
};

}  // namespace emend::workflow
