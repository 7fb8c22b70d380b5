// What `trace` and `suggest` share: which facts are traced, and how.
#pragma once

#include <emend/evaluation/tracing.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "model_options.h"

namespace emend::tools {

struct TraceSettings {
  ModelOptions model;
  std::string facts;            ///< empty: the facts that come with emend
  std::string prompt, subject;  ///< one fact instead
  evaluation::TraceOptions trace;
};

void add_trace_options(CLI::App& command, TraceSettings& settings);

/// Known facts of a file: rows with prompt, subject and attribute, or any facts format with an old answer.
/// Throws Error(kInvalidArgument) if no fact has one.
[[nodiscard]] std::vector<datasets::KnownFact> load_traceable(const TraceSettings& settings, const Common& common);

/// The dtype that "auto" means: bfloat16 where the processor multiplies it, else float32.
void resolve_trace_dtype(ModelOptions& model, const Common& common);

}  // namespace emend::tools
