// What a run has gathered by its end, typed; documents.h makes files of it.
#pragma once

#include <emend/datasets/lint.h>
#include <emend/editors/editor.h>
#include <emend/evaluation/collapse_guard.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/free_text.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace emend::workflow {

/// A batch that is finished is the result of its edit. One without outcomes is the editor's correction after the last
/// batch: it has no facts.
using Batch = editors::EditResult;

/// What a sequence needs beside its batches to go on in another process.
struct SessionState {
  std::map<std::string, at::Tensor> editor = {};        ///< the editor's memory
  std::vector<evaluation::GuardReading> readings = {};  ///< of the collapse guard, one a batch that it looked at
};

/// What was measured between batches.
struct Measured {
  evaluation::RetentionMatrix retention;
  /// Drops what was measured after more than so many edits.
  void cut(int64_t edits) {
    std::erase_if(lifelong, [&](const auto& entry) { return entry.at("edits").template get<int64_t>() > edits; });
    retention.cut(edits);
  }
  /// Edits at the last measurement; 0 without one.
  [[nodiscard]] int64_t edits() const {
    return std::max(retention.edits(), lifelong.empty() ? 0 : lifelong.back().at("edits").get<int64_t>());
  }
  std::vector<nlohmann::json> lifelong;  ///< entries as measure_sequence makes them, with seconds and bytes
};

/// The one judgement on a fact, the same in every file, on the terminal and in the exit status.
enum class Verdict {
  kSaid,     ///< greedy text after the edited prompt begins with the new answer
  kNotSaid,  ///< written, but the model says something else
  kFailed,   ///< not written
};
struct FactVerdict {
  Verdict verdict = Verdict::kFailed;
  std::string reason;  ///< empty where it is said
};
/// "said", "not_said", "failed".
[[nodiscard]] std::string_view to_string(Verdict verdict);

/// `outcome`: null for a fact that was not edited.
[[nodiscard]] FactVerdict judge(const editors::FactOutcome* outcome, const evaluation::Answer& answer);

struct RunRecord {
  std::string editor, model_path, out;
  std::string started;        ///< "2026-11-21T14:00:00Z"
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
  nlohmann::ordered_json peak_bytes;      ///< by device, of the process since the last run in it began
  std::vector<std::string> weights_changed;
  int64_t spare_neurons = 0;                                                ///< that every MLP got before the edit
  std::map<std::string, std::string> files;                                 ///< what → path, in the order to print
  std::vector<FactVerdict> verdicts;                                        ///< one a fact, once all are judged
  [[nodiscard]] std::vector<const editors::FactOutcome*> outcomes() const;  ///< of all batches, in the facts' order
  [[nodiscard]] int64_t count(Verdict verdict) const {
    return std::ranges::count_if(verdicts, [&](const auto& one) { return one.verdict == verdict; });
  }
};

}  // namespace emend::workflow
