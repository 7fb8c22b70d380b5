// What an interrupted run leaves so that it can go on: the deltas of every finished batch and the editor's memory.
#pragma once

#include <emend/core/log.h>
#include <emend/workflow/record.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::workflow {

/// Folder "checkpoint" of a run. Every file is written atomically with a checksum.
class RunCheckpoint {
 public:
  /// `settings` is everything that decides the result; a folder made with other settings is refused.
  /// Throws Error(kInvalidArgument) naming the first setting that differs when resuming.
  /// A `reader` (of several processes, all but the first) writes nothing; without `resume` it finds nothing.
  RunCheckpoint(std::filesystem::path folder, nlohmann::json settings, bool resume, bool reader = false);

  /// Keeps the command line that the run began with, for resuming it by its folder alone.
  void keep_command(const std::vector<std::string>& command) const;
  /// That of the interrupted run in the folder `run`; nothing if there is none.
  [[nodiscard]] static std::vector<std::string> command_of(const std::filesystem::path& run);

  /// The batches that are complete, in order, up to one whose file is damaged or of another run, which is reported.
  [[nodiscard]] std::vector<Batch> load(const Log& log) const;
  /// Of the editor's memory only tensors that are not the ones of the last call, unchanged, are written again.
  void save(size_t index, const Batch& batch, const SessionState& state);
  /// What the session was after the last of `batches` batches.
  /// Throws Error(kCorruption) naming the file when a part of it is missing or damaged: it cannot be computed again.
  [[nodiscard]] SessionState state(size_t batches) const;
  /// What was measured between batches so far.
  void save_measured(const Measured& measured) const;
  /// As far as the first `edits` edits go; nothing if it is not there, or damaged (with a warning).
  [[nodiscard]] Measured measured(size_t edits, const Log& log) const;
  /// The run is complete: the folder is no longer needed.
  void remove() const;

 private:
  [[nodiscard]] std::filesystem::path batch_path(size_t index) const;
  std::filesystem::path folder_;
  bool reader_ = false, fresh_ = false;
  std::string run_;  // SHA-256 of its settings: whose the batches are
  size_t read_ = 0;  // readings of the guard that are saved
  struct Kept {
    at::Tensor tensor;
    int64_t version = 0;
    std::string file;
  };
  std::map<std::string, Kept> kept_;  // the editor's memory as it was last saved, and where each part is
};

}  // namespace emend::workflow
