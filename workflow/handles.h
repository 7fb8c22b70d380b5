// What is lent to a run: nothing here decides its result.
#pragma once

#include <emend/core/cancel.h>
#include <emend/core/log.h>
#include <emend/devices/work_sharing.h>

#include <functional>
#include <string>
#include <vector>

namespace emend::editors {
class StatisticsProvider;
}

namespace emend::workflow {

struct Handles {
  CancelToken cancel = {};  ///< stops the run between two steps, from another thread or a signal handler
  Log log = {};
  /// Called between steps. It may throw; what it returns is not looked at: see stopping().
  ProgressFn progress = {};
  /// Second moments of the caller's own, used instead of those that the options describe; must outlive the run.
  editors::StatisticsProvider* statistics = nullptr;
  devices::WorkSharing sharing = {};           ///< among several processes that work together
  std::vector<std::string> command_line = {};  ///< for the report
};

/// The words of a command line, quoted where a shell needs it, with spaces between them.
[[nodiscard]] std::string command_text(const std::vector<std::string>& words);

/// A progress callback that ends the work with Error(kCancelled) where `go_on` returns false. Every weight then has the
/// bytes that it had before the batch, and a session can go on. An empty one gives an empty one.
[[nodiscard]] ProgressFn stopping(std::function<bool(const ProgressUpdate&)> go_on);

}  // namespace emend::workflow
