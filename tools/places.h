// What a command reads and where it writes, judged from its options before anything is loaded.
#pragma once

#include <emend/core/option.h>

namespace emend::tools {

/// An option whose place is written beside what the command is for, wherever that is: logs and caches.
[[nodiscard]] bool writes_beside(std::string_view name);

/// Places to write are followed through links and "..", so that every verb writes where its user would look.
/// Throws Error(kNotFound) for a file to read that is not there; Error(kInvalidArgument) for a place to write that is
/// read by the same command, lies inside of its model, or is a device, a pipe or a link to nothing.
void settle_places(Options& options);

}  // namespace emend::tools
