// The one place where a run's records become JSON and text, and are read back: the checkpoint's batches and
// measurements, results.json, the lines of cases.jsonl, the extras of the report, and the summary for people.
#pragma once

#include <emend/models/model.h>
#include <emend/workflow/options.h>
#include <emend/workflow/record.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace emend::workflow {

[[nodiscard]] nlohmann::ordered_json results_document(const RunRecord& record, const RunOptions& options,
                                                      const datasets::FactSet& facts,
                                                      const models::Model& model);  ///< results.json
[[nodiscard]] std::vector<nlohmann::json> case_documents(const RunRecord& record,
                                                         const datasets::FactSet& facts);  ///< cases.jsonl
[[nodiscard]] nlohmann::json report_extras(const RunRecord& record, const datasets::FactSet& facts,
                                           const models::Model& model);  ///< report.json
/// What a person wants to know at the end.
[[nodiscard]] std::string summary_text(const RunRecord& record, const datasets::FactSet& facts);

/// An aligned table of summaries: one column for each state ("before", "after"), one row a metric.
[[nodiscard]] std::string metrics_table(const std::vector<std::pair<std::string, nlohmann::json>>& states);

/// Everything of a batch but its tensors; a delta says where it belongs.
[[nodiscard]] nlohmann::json batch_document(const Batch& batch);
/// The batch without tensors. Throws nlohmann::json::exception.
[[nodiscard]] Batch read_batch_document(const nlohmann::json& document);
[[nodiscard]] nlohmann::json measured_document(const Measured& measured);
/// Throws nlohmann::json::exception, Error(kCorruption).
[[nodiscard]] Measured read_measured_document(const nlohmann::json& document);

/// Peak memory by device.
[[nodiscard]] nlohmann::ordered_json peak_bytes(const models::Model& model);

/// How much of each weight's change was left after rounding to its type; of several batches, the least.
[[nodiscard]] std::map<std::string, double> survived_by_weight(const std::vector<Batch>& batches);

}  // namespace emend::workflow
