#include "compute_options.h"

#include <emend/core/dtype_name.h>
#include <emend/core/error.h>
#include <emend/models/compute_copy.h>

#include <algorithm>

#include "model_options.h"

namespace emend::tools {

void add_compute_option(CLI::App& command, std::string& text, const char* group) {
  auto* option =
      command
          .add_option(
              "--compute-dtype", text,
              "arithmetic of the frozen layers while targets are optimised: float32, tf32 (GPUs), bfloat16, or auto "
              "(bfloat16 where the devices multiply it natively)")
          ->check(CLI::IsMember({"auto", "float32", "tf32", "bfloat16"}));
  if (*group) option->group(group);
}

ComputeChoice chosen_compute(const std::string& text, editors::Engine engine, const models::Model& model) {
  ComputeChoice choice;
  choice.tf32 = text == "tf32";
  if (text == "auto") {
    if (engine == editors::Engine::kFast) choice.dtype = models::fast_compute_dtype(model);
  } else {
    choice.dtype = choice.tf32 ? at::kFloat : parse_dtype(text, "--compute-dtype");
  }
  const auto dtype = choice.dtype.value_or(model.dtype());
  choice.plain = dtype == model.dtype() && !choice.tf32;
  choice.name = choice.tf32 ? "tf32" : dtype_name(dtype);
  if (choice.tf32 && model.dtype() != at::kFloat)
    throw Error(ErrorClass::kInvalidArgument,
                {"--compute-dtype", "tf32 with a model in " + dtype_name(model.dtype()), "a float32 model",
                 "TF32 is a way to multiply float32 matrices: choose it with --dtype float32"});
  const auto& layers = model.placement().layers;
  if (choice.tf32 && std::none_of(layers.begin(), layers.end(), [](c10::Device device) { return device.is_cuda(); }))
    throw Error(ErrorClass::kInvalidArgument,
                {"--compute-dtype", "tf32 for a model without a layer on an NVIDIA GPU", "auto, float32 or bfloat16",
                 "TF32 is arithmetic of these GPUs: name one with --device-map"});
  if (engine == editors::Engine::kReference && !choice.plain)
    throw Error(ErrorClass::kInvalidArgument,
                {"--compute-dtype", text + " with --engine reference", "auto",
                 "the reference engine computes in the model's dtype; choose that with --dtype"});
  return choice;
}

}  // namespace emend::tools
