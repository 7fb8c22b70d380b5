// What a run leaves for people: one self-contained web page, a table, and files in the MEMIT repository's form.
//
// The input is plain data, as the run's own files hold it, so a report can be written again at any time
// (`emend report RUN`) and by programs that never saw the model.
//
// Goals: the page explains itself, needs no network and no other file, prints, fits a phone, follows light and dark.
// It is templates/page.html, whose script draws one embedded JSON document: no HTML is made here. Non-goals:
// interactive exploration, styling options.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::evaluation {

/// Everything a report shows. Only `results` is required; each missing part leaves out its section.
struct RunReport {
  nlohmann::json results = nlohmann::json::object();  ///< results.json
  std::vector<nlohmann::json> cases;                  ///< the lines of cases.jsonl
  /// report.json, all members optional:
  ///   "command": "memit_edit …", "directory": "runs/…", "started": "2026-…",
  ///   "versions": {"emend": "…", "libtorch": "…", …}, "machine": {"cpu": "…", …}, "notes": ["…"],
  ///   "continuations": [{"case_id": 7, "prompt": "…", "before": "…", "after": "…", "target": "…",
  ///                      "probability_before": 0.01, "probability_after": 0.97}],
  ///   "curves": [{"case_id": 7, "loss": […], "nll": […], "kl": […], "weight_decay": […], "probability": […]}],
  ///   "layers": [{"layer": 4, "weight": "…", "update_norm": 1.2, "weight_norm": 60.1, "relative": 0.02,
  ///               "spectrum": [leading singular values of the update],
  ///               "survived": 0.99 (of the update after the cast)}],
  ///   "efficacy_by_edits": [{"edits": 10, "efficacy_success": 99.0, "paraphrase_success": …}],
  ///   "retention": RetentionMatrix::to_json(),
  ///   "memory": {"cpu": {"weights": bytes, "peak": bytes}},
  ///   "placement": {"devices": ["cpu"], "layers": {"0": "cpu"}, "head": "cpu", "edited_layers": [4,5]},
  ///   "training_loss": [of every optimiser step of a fine-tuning],
  ///   "trace": to_json(TraceSummary) (evaluation/tracing.h): heat maps of causal tracing
  nlohmann::json extras = nlohmann::json::object();
};

/// Reads results.json, and cases.jsonl and report.json where they exist. Throws Error(kNotFound) if the folder or
/// results.json is missing, Error(kCorruption) naming file and line for damaged JSON.
[[nodiscard]] RunReport load_run(const std::filesystem::path& folder);

/// The page as text. Texts that come from data stay data: they are never read as HTML. At most 3 MB for 1,000 facts:
/// longer lists are cut with a note that names the file that holds them all.
[[nodiscard]] std::string render_report(const RunReport& run);

/// The page of `emend direct`: {"title", "model", "fit": {"layers": [{"layer", "accuracy", "auc", "effect", "size"}],
/// …}, "change": [{"layer", "weight", "relative_norm", "left"}], "effect": compare_effects's document}, each but the
/// title optional.
[[nodiscard]] std::string direction_page(nlohmann::json data);

/// metrics.csv:
/// family,metric,paper_name,unit,before,after,change,ci95_before_low,ci95_before_high,ci95_after_low,ci95_after_high,n
[[nodiscard]] std::string metrics_csv(const nlohmann::json& results);

/// One file a case as the MEMIT repository writes them ("{N}_edits-case_{id}.json", counterfact and zsre families),
/// which its summary script reads. The folder is created. Returns how many files were written.
int64_t write_case_files(const std::filesystem::path& folder, const RunReport& run);

/// Paired differences (second minus first, after editing) over the cases that both runs hold, with 95 % intervals:
/// {"first": "…", "second": "…", "paired_cases": 300, "same_facts": true, "differences": [{"family", "metric",
///  "paper_name", "first", "second", "difference", "ci95": [low, high], "n", "significant"}], "notes": [...]}.
[[nodiscard]] nlohmann::json compare_runs(const RunReport& first, const RunReport& second);
/// The same as an aligned text table.
[[nodiscard]] std::string format_comparison(const nlohmann::json& comparison);

}  // namespace emend::evaluation
