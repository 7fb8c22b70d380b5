// The folder of one run: locked while the run lasts, every file complete or absent.
#pragma once

#include <emend/core/atomic_file.h>
#include <emend/core/log.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::workflow {

/// What a run finds in its folder: no run, perhaps one that was interrupted, or it does not matter.
enum class Earlier { kNone, kInterrupted, kAny };

class RunDirectory {
 public:
  /// Throws what the constructor throws for what the folder holds; makes nothing.
  static void check(const std::filesystem::path& folder, Earlier expected);
  /// Creates the folder (and its parents) and takes its lock.
  /// Throws Error(kIo) if it cannot be created or written, Error(kInvalidArgument) if another run holds it, or if it
  /// holds the results of a run, or finished batches of one where none is expected.
  RunDirectory(std::filesystem::path folder, Earlier expected);
  /// A folder that this object made goes again, unless the run came to its end, left batches to go on from, or is to
  /// be kept.
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  /// Throws Error(kInvalidArgument) if the folder holds one of these, which a new run would replace.
  void require_free(const std::vector<std::string>& names) const;
  void keep() noexcept { made_ = false; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return folder_; }
  [[nodiscard]] std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }

  void write_json(const std::string& name, const nlohmann::ordered_json& document) const;       ///< throws Error(kIo)
  void write_lines(const std::string& name, const std::vector<nlohmann::json>& objects) const;  ///< one a line

  /// "runs/20261121-140501-memit-SmolLM2-135M"
  [[nodiscard]] static std::filesystem::path default_name(const std::string& editor, const std::string& model);

 private:
  std::filesystem::path folder_;
  bool made_ = false;  // there was nothing before
  Descriptor lock_;
};

/// Throws Error(kInvalidArgument) if there is something at `path` and not `force`, or something that cannot be replaced
/// (require_replaceable), Error(kIo) if nothing can be written there.
void require_new(const std::string& path, bool force);

/// A sink that hands every event to `take`.
[[nodiscard]] std::shared_ptr<LogSink> make_sink(std::function<void(const LogEvent&)> take);

/// A log that also writes to `path`, as JSON lines.
[[nodiscard]] Log log_also_to(const Log& log, const std::filesystem::path& path);

/// JSON text that never fails: bytes that are not UTF-8 become U+FFFD.
[[nodiscard]] std::string dump_json(const nlohmann::ordered_json& document, int indent = 2);

}  // namespace emend::workflow
