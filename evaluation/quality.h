// Several runs on the same facts in one table: what each editor's model says afterwards, and what that has cost.
//
// The input is the folders of runs, so a table can be made again at any time, by programs that never saw the model.
//
// Goals: every figure is one of a run's own results.json, with its interval; a run that failed is a row that says so.
// Non-goals: running editors (workflow/variants.h).
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::evaluation {

/// A run of the table. Its folder holds results.json, or failure.json where the run has none ({"error": "…"}, and
/// "lifelong", the measurements before it broke off), or neither while it is still to be done.
struct QualityEntry {
  std::string name;   ///< "memit: clamp_norm_factor=0.4, seed 1"
  std::string group;  ///< the same without the seed: runs of one group are averaged
  std::filesystem::path folder;
};

/// The table as JSON (docs/metrics.md, "Editors compared"):
///   "columns": [{"key": "free.edit_begins", "head": "edited prompt", "unit": "%", "higher": true, "definition": "…"}],
///   "rows": [{"name", "kind": "unedited|told|editor|mean", "state": "finished|failed|pending", "note", "folder",
///             "seed", "figures": {KEY: {"value", "ci95": [low, high], "difference", "difference_ci95", "differs"}},
///             "lifelong": […], "collapse": collapse_point(…)}],
/// with the facts, model and protocol that all have in common. A mean over seeds has "range" instead of "ci95".
/// Differences are paired with the first run that has figures (compare_runs). Columns that no row has are left out.
/// Throws Error(kInvalidArgument) naming the folder whose facts, model or protocol are not those of the others, and
/// what load_run throws.
[[nodiscard]] nlohmann::json quality_document(const std::vector<QualityEntry>& entries);

/// Where a sequence has collapsed: at the first entry of results.json's "lifelong" at which fewer than kHeld percent of
/// the first facts hold, or LAMBADA is below kWhole of `lambada`, the unedited model's accuracy (null: that of the
/// first entry). {"edits": 500, "why": "…"}; "edits" is null if it has not.
[[nodiscard]] nlohmann::json collapse_point(const nlohmann::json& entries, const nlohmann::json& lambada);
inline constexpr double kHeld = 80, kWhole = 0.8;

/// The document as Markdown, to be pasted: a table of the final states and, of lifelong runs, one of the last
/// measurements and one for each figure along the way. Intervals stand in brackets.
[[nodiscard]] std::string quality_table(const nlohmann::json& document);
/// The same as a page with charts.
[[nodiscard]] std::string quality_page(const nlohmann::json& document);

}  // namespace emend::evaluation
