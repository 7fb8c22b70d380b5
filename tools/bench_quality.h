// `emend bench --quality`: several editors on the same facts.
#pragma once

#include <emend/workflow/options.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cli.h"

namespace emend::tools {

struct QualityArguments {
  bool wanted = false;
  std::vector<std::string> editors;
  std::vector<int64_t> seeds;
};

/// As --limit, where none was given: eight facts to be timed, all to be compared.
inline constexpr int64_t kFactsByPurpose = -2;

/// Adds --quality, --editors, --seeds, --out and --resume, and says which options of an edit go with them alone.
void add_quality_options(Options& o, QualityArguments& quality, workflow::RunOptions& edit);

/// Lets --resume go on from the command line that the folder keeps.
void resume_quality(Options& o, const QualityArguments& quality, const workflow::RunOptions& edit);

/// Runs what is not finished and prints the table of all; without editors and --resume only the table. `o` are the
/// options that were parsed. Throws what compare_variants and draw_comparison throw.
int run_quality(const Options& o, const QualityArguments& quality, workflow::RunOptions edit, Common& common);

}  // namespace emend::tools
