// One run of an editor: read, evaluate, edit batch by batch, evaluate, write.
#pragma once

#include "options.h"

namespace emend::tools {

/// Runs `memit_edit`. Returns the exit status; errors are thrown and leave the run folder resumable.
[[nodiscard]] int run_edit(const EditOptions& options, Common& common);

}  // namespace emend::tools
