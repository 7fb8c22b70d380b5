// The options by which a verb names facts and metrics.
#pragma once

#include <emend/datasets/fact.h>
#include <emend/evaluation/evaluation.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli.h"

namespace emend::tools {

struct FactOptions {
  std::string file;
  datasets::ReadOptions read;
};

struct MetricOptions {
  std::vector<std::string> names = {"auto"};
  bool generation = false;
  std::string snippets, idf_corpus, health_data;
  int64_t health_limit = 100;
  int64_t batch_tokens = 2048;
  std::string engine = "fast";
  std::string cache = ".cache/emend";  ///< evaluations of unedited models and key statistics
};

void add_fact_options(CLI::App& command, FactOptions& options, bool required);
void add_metric_options(CLI::App& command, MetricOptions& options);

/// Reads the facts and logs how many.
[[nodiscard]] datasets::FactSet load_named_facts(const FactOptions& options, const Common& common);
[[nodiscard]] evaluation::EvaluateOptions evaluate_options(const MetricOptions& options, const Common& common,
                                                           uint64_t seed);

/// An aligned table of summaries: one column for each state ("before", "after"), one row a metric.
[[nodiscard]] std::string metrics_table(const std::vector<std::pair<std::string, nlohmann::json>>& states);

}  // namespace emend::tools
