// What every verb shares: how it is registered, what it is given, and how errors become exit codes.
#pragma once

#include <emend/core/cancel.h>
#include <emend/core/log.h>
#include <emend/devices/work_sharing.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace emend::devices {
class Collectives;
}

namespace emend::tools {

/// Options that all verbs have, and the handles made from them.
struct Common {
  bool json = false;     ///< one JSON document on standard output instead of text
  bool quiet = false;    ///< only warnings and errors on standard error
  std::string log_file;  ///< JSON lines
  CancelToken cancel;    ///< set by SIGINT and SIGTERM
  Log log;               ///< made from the above before the verb runs
  ProgressFn progress;   ///< draws on standard error; empty when quiet
  std::vector<std::string> command_line;
  devices::Collectives* group = nullptr;  ///< of several processes (process_group.h), or null
  devices::WorkSharing sharing;           ///< among them

  /// A log that also writes to `path`, as JSON lines.
  [[nodiscard]] Log log_also_to(const std::string& path) const;
};

/// A verb declares its options on `command` and returns what to do once they are parsed.
/// The function returns the exit status; errors are thrown.
using VerbRun = std::function<int(Common&)>;
using VerbSetup = VerbRun (*)(CLI::App& command);

struct Verb {
  const char* name;
  const char* summary;
  VerbSetup setup;
};

/// The words of a command line with spaces between them.
[[nodiscard]] std::string command_text(const std::vector<std::string>& words);

/// In the order of verbs.def.
[[nodiscard]] const std::vector<Verb>& verbs();

/// Adds --json, --quiet and --log-file.
void add_common_options(CLI::App& command, Common& common);

/// `emend VERB …`. Returns the exit status; never throws.
int run_emend(int argc, char** argv);
/// `memit_edit …`, which equals `emend edit …`.
int run_memit_edit(int argc, char** argv);

/// The full help of every verb, for the golden test of options.
[[nodiscard]] std::string all_help();

}  // namespace emend::tools
