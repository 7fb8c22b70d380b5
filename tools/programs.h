// The two programs, for their mains: nothing else is included here, so that these compile in no time.
#pragma once

namespace emend::tools {

/// `emend VERB …`. Returns the exit status; never throws.
int run_emend(int argc, char** argv);
/// `memit_edit …`, which equals `emend edit …`.
int run_memit_edit(int argc, char** argv);

}  // namespace emend::tools
