// How a verb is run: interruptions, memory that ends, and exceptions that become exit statuses.
#pragma once

#include <functional>

#include "cli.h"

namespace emend::tools {

/// Stands behind an option that the verb at hand lacks, before the name of a verb that has it. Advice that needs such
/// an option is left out of errors.
inline constexpr const char* kOfOther = " of emend ";

/// Runs a verb with handles made from the options in `common`. SIGINT and SIGTERM ask it to end, and end the process
/// once asked before. Returns its exit status, or that of the error it threw, which is logged.
///   before_files  what has to be known before a file is opened
int run_guarded(const VerbRun& run, Common& common, const std::function<void()>& before_files);

}  // namespace emend::tools
