// --compute-dtype: in which arithmetic the frozen layers run.
#pragma once

#include <emend/editors/editor.h>

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

namespace emend::tools {

/// `text` keeps what was given: auto, float32 or bfloat16; what it holds before is the default.
void add_compute_option(CLI::App& command, std::string& text, const char* group);

/// For EditContext::compute_dtype. auto: bfloat16 where the devices multiply it natively, for the fast engine on a
/// float32 model; else the model's own. Throws Error(kInvalidArgument) for the reference engine with another dtype than
/// the model's.
[[nodiscard]] std::optional<at::ScalarType> chosen_compute_dtype(const std::string& text, editors::Engine engine,
                                                                 const models::Model& model);

/// "float32", "bfloat16" or "float64", for documents.
[[nodiscard]] std::string compute_dtype_name(std::optional<at::ScalarType> dtype, const models::Model& model);

}  // namespace emend::tools
