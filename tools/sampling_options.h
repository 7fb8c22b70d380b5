// The options that say how text is continued.
#pragma once

#include <emend/models/generation.h>

#include <CLI/CLI.hpp>

namespace emend::tools {

/// Adds --max-new-tokens, --temperature, --top-k, --top-p, --min-p, --repetition-penalty, --seed and --prefill-chunk.
void add_sampling_options(CLI::App& command, models::GenerateOptions& generate);

}  // namespace emend::tools
