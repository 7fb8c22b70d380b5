// The documents of a run: results.json, the lines of cases.jsonl, the extras of the report, and the summary for people.
#pragma once

#include <emend/evaluation/evaluation.h>
#include <emend/models/model.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "options.h"

namespace emend::tools {

/// Everything that a run has gathered by its end.
struct RunRecord {
  std::string editor, model_path, out;
  std::string compute_dtype;  ///< of the frozen layers while targets were optimised
  nlohmann::json hparams;
  std::vector<std::string> command_line;
  std::vector<std::string> metrics;
  std::optional<evaluation::Evaluation> before, after;
  std::vector<evaluation::Continuation> text_before, text_after;  ///< of the first --show facts
  std::vector<FinishedBatch> batches;
  std::vector<editors::RuntimePart> runtime;  ///< what the edits add beside the weights
  nlohmann::json efficacy_by_edits = nlohmann::json::array();
  evaluation::RetentionMatrix retention;
  nlohmann::json findings = nlohmann::json::array();  ///< of the linter, about the facts as given
  nlohmann::json guard = nlohmann::json::array();     ///< readings of the collapse guard, one a batch
  nlohmann::json statistics;
  nlohmann::json transfers;
  std::map<std::string, double> seconds;
  std::vector<std::string> weights_changed;
  std::map<std::string, std::string> files;  ///< what → path, in the order to print
  int64_t failed = 0;
};

[[nodiscard]] nlohmann::ordered_json results_document(const RunRecord& record, const EditOptions& options,
                                                      const datasets::FactSet& facts, const models::Model& model);
[[nodiscard]] std::vector<nlohmann::json> case_documents(const RunRecord& record, const datasets::FactSet& facts);
[[nodiscard]] nlohmann::json report_extras(const RunRecord& record, const datasets::FactSet& facts,
                                           const models::Model& model);
/// What a person wants to know at the end.
[[nodiscard]] std::string summary_text(const RunRecord& record, const datasets::FactSet& facts);

}  // namespace emend::tools
