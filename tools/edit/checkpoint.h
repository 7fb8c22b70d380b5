// What an interrupted run leaves so that it can go on: the deltas of every finished batch and the editor's memory.
#pragma once

#include <emend/editors/editor.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace emend::tools {

/// One finished batch, as it is kept on disk and in memory.
struct FinishedBatch {
  std::vector<editors::WeightDelta> deltas;  ///< in the order of writing
  std::vector<nlohmann::json> outcomes;      ///< editors::to_json(FactOutcome), one a fact
  std::vector<nlohmann::json> layers;        ///< editors::to_json(LayerFigures)
  nlohmann::json seconds = nlohmann::json::object();
  nlohmann::json contexts;  ///< templates in use, or null
  nlohmann::json hparams;
  bool closing = false;  ///< the editor's correction after the last batch: it has no facts
};

/// Folder "checkpoint" of a run. Every file is written atomically with a checksum.
class RunCheckpoint {
 public:
  /// `settings` is everything that decides the result; a folder made with other settings is refused.
  /// Throws Error(kInvalidArgument) naming the first setting that differs when resuming.
  /// A `reader` (of several processes, all but the first) writes nothing; without `resume` it finds nothing.
  RunCheckpoint(std::filesystem::path folder, nlohmann::json settings, bool resume, bool reader = false);

  /// The batches that are complete, in order; a damaged last file is reported and left out.
  [[nodiscard]] std::vector<FinishedBatch> load(const Log& log) const;
  void save(size_t index, const FinishedBatch& batch, const std::map<std::string, at::Tensor>& editor_state) const;
  /// The editor's memory after the last of `batches` batches; empty if it has none.
  [[nodiscard]] std::map<std::string, at::Tensor> editor_state(size_t batches) const;
  /// What was measured between batches so far: {"efficacy_by_edits": …, "retention": …}.
  void save_measured(const nlohmann::json& measured) const;
  /// Null if there is nothing, or if it goes beyond `edits` finished edits.
  [[nodiscard]] nlohmann::json measured(size_t edits) const;
  /// The run is complete: the folder is no longer needed.
  void remove() const;

 private:
  [[nodiscard]] std::filesystem::path batch_path(size_t index) const;
  [[nodiscard]] std::filesystem::path state_path(size_t index) const;
  std::filesystem::path folder_;
  bool reader_ = false, fresh_ = false;
};

/// Puts finished batches into the model, delta by delta as they were written the first time, so that the weights get
/// the same bytes.
void reapply(const std::vector<FinishedBatch>& batches, editors::EditTransaction& transaction);

[[nodiscard]] FinishedBatch finished_batch(const editors::EditResult& result);

}  // namespace emend::tools
