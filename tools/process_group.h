// The processes that a launcher (torchrun, mpirun, srun) started together, as the programs see them.
#pragma once

#include <functional>

#include "cli.h"

namespace emend::tools {

/// Joins the group that the environment describes and runs `work` in it, with `common.group` and `common.sharing` set;
/// a process on its own just runs it. The first process speaks; the others show errors only, with their rank before
/// them. A process that is lost after an interruption counts as interrupted: a launcher sends the signal to all.
/// Returns what `work` returns. Throws what it throws, and what devices::join_processes throws.
int run_together(Common& common, const std::function<int()>& work);

}  // namespace emend::tools
