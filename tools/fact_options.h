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

/// `unless`: an option with which --facts is not required.
void add_fact_options(Options& o, FactOptions& options, bool required, const std::string& unless = "");
void add_zsre_option(OptionGroup group, datasets::ReadOptions& read);
/// The default of --cache is user_cache().
void add_metric_options(Options& o, MetricOptions& options);

/// --cache, with user_cache() as its default.
void add_cache_option(OptionGroup group, std::string& cache, const std::string& meaning);

/// "counterfact, mquake, …", of all formats or of those that can be written.
[[nodiscard]] std::string fact_format_names(bool writable = false);

}  // namespace emend::tools
