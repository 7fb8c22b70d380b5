#include "compute_options.h"

#include <emend/core/error.h>
#include <emend/models/compute_copy.h>

#include "model_options.h"

namespace emend::tools {

void add_compute_option(CLI::App& command, std::string& text, const char* group) {
  auto* option =
      command
          .add_option(
              "--compute-dtype", text,
              "arithmetic of the frozen layers while targets are optimised: float32, bfloat16, or auto (bfloat16 "
              "where the devices multiply it natively)")
          ->check(CLI::IsMember({"auto", "float32", "bfloat16"}));
  if (*group) option->group(group);
}

std::optional<at::ScalarType> chosen_compute_dtype(const std::string& text, editors::Engine engine,
                                                   const models::Model& model) {
  if (text == "auto")
    return engine == editors::Engine::kFast ? std::optional(models::fast_compute_dtype(model)) : std::nullopt;
  const auto dtype = parse_dtype(text, "--compute-dtype");
  if (engine == editors::Engine::kReference && dtype != model.dtype())
    throw Error(ErrorClass::kInvalidArgument,
                {"--compute-dtype", text + " with --engine reference", "auto",
                 "the reference engine computes in the model's dtype; choose that with --dtype"});
  return dtype;
}

std::string compute_dtype_name(std::optional<at::ScalarType> dtype, const models::Model& model) {
  switch (dtype.value_or(model.dtype())) {
    case at::kBFloat16:
      return "bfloat16";
    case at::kDouble:
      return "float64";
    default:
      return "float32";
  }
}

}  // namespace emend::tools
