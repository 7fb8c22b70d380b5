// --compute-dtype: in which arithmetic the frozen layers run.
#pragma once

#include <emend/editors/editor.h>

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

namespace emend::tools {

/// `text` keeps what was given: auto, float32, tf32 or bfloat16; what it holds before is the default.
void add_compute_option(CLI::App& command, std::string& text, const char* group);

struct ComputeChoice {
  std::optional<at::ScalarType> dtype;  ///< EditContext::compute_dtype
  bool tf32 = false;                    ///< EditContext::tf32
  std::string name;                     ///< for documents: "float32", "tf32", "bfloat16" or "float64"
  bool plain = true;                    ///< the model's own arithmetic
};
/// auto: bfloat16 where the devices multiply it natively, for the fast engine on a float32 model; else the model's own.
/// Throws Error(kInvalidArgument) for tf32 with another model than float32 or without a GPU, and for the reference
/// engine with another arithmetic than the model's.
[[nodiscard]] ComputeChoice chosen_compute(const std::string& text, editors::Engine engine, const models::Model& model);

}  // namespace emend::tools
