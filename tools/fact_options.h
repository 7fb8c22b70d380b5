// The options by which a verb names facts and metrics.
#pragma once

#include <emend/workflow/documents.h>
#include <emend/workflow/inputs.h>

#include <string>

#include "cli.h"

namespace emend::tools {

using workflow::FactOptions;
using workflow::MetricOptions;
using workflow::metrics_table;

/// Where the programs keep evaluations of unedited models and key statistics.
inline constexpr const char* kCacheFolder = ".cache/emend";

void add_fact_options(Options& o, FactOptions& options, bool required);
void add_zsre_option(OptionGroup group, datasets::ReadOptions& read);
/// The default of --cache is kCacheFolder.
void add_metric_options(Options& o, MetricOptions& options);

/// "counterfact, mquake, …", of all formats or of those that can be written.
[[nodiscard]] std::string fact_format_names(bool writable = false);

}  // namespace emend::tools
