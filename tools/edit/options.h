// The command line of `memit_edit`.
#pragma once

#include <emend/workflow/options.h>

#include "../fact_options.h"
#include "../model_options.h"

namespace emend::tools {

using workflow::RunOptions;

void add_edit_options(Options& o, RunOptions& options);
/// Those of them that say how facts are edited and judged: editor, key statistics, evaluation, guards.
void add_method_options(Options& o, RunOptions& options);
/// --stats-tokens and --stats-import: how much text the key statistics are taken from, or which finished ones are used.
void add_stats_amount_options(OptionGroup group, RunOptions& options);

}  // namespace emend::tools
