// The processes that a launcher started together, as the programs see them.

#include <emend/core/error.h>
#include <emend/devices/collectives.h>

#include "cli.h"

namespace emend::tools {
namespace {

// Errors of one process of several, with its rank.
std::shared_ptr<LogSink> ranked_errors(int rank, int size) {
  const std::string who = "process " + std::to_string(rank) + " of " + std::to_string(size);
  return workflow::make_sink([who, terminal = make_terminal_sink(LogLevel::kError, wants_colour(2))](LogEvent event) {
    if (!event.text.starts_with(who)) event.text = who + ": " + event.text;
    terminal->write(event);
  });
}

}  // namespace

int run_together(Common& common, const std::function<int()>& work) {
  const auto environment = devices::read_process_environment();
  if (environment.size == 1) return work();
  const auto group = devices::join_processes(environment, {}, environment.rank == 0 ? common.log : Log());
  common.sharing = devices::WorkSharing(*group);
  // It goes with the group; the log of errors that end the process stays.
  const std::shared_ptr<void> leave(nullptr, [&](void*) { common.sharing = {}; });
  if (group->rank() > 0) {
    common.progress = {};
    common.log = Log({ranked_errors(group->rank(), group->size())});
  }
  common.log.event(LogLevel::kInfo, "processes",
                   std::to_string(environment.size) + " processes share the work (" + environment.source + ")",
                   {{"processes", environment.size}, {"launcher", environment.source}});
  try {
    return work();
  } catch (const Error& error) {
    if (error.error_class() == ErrorClass::kDevice) common.cancel.check("run");
    throw;
  }
}

}  // namespace emend::tools
