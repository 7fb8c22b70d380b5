#include <emend/core/safetensors.h>
#include <emend/core/setting.h>
#include <emend/editors/settings.h>
#include <emend/models/compute_copy.h>

#include <algorithm>

namespace emend::editors {

std::optional<at::ScalarType> arithmetic_of(const EditChoices& choices, at::ScalarType model,
                                            std::span<const c10::Device> devices) {
  const std::string& text = choices.compute_dtype;
  if (text.empty() || (text == "auto" && choices.engine != Engine::kFast)) return std::nullopt;
  if (text == "auto") return models::fast_compute_dtype(model, devices);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble})
    if (text == dtype_name(dtype)) return dtype;
  if (text == "tf32") return at::kFloat;
  refuse({setting("compute_dtype"), "\"" + text + "\"", "auto, float32, tf32 or bfloat16", ""});
}

std::string_view to_string(Engine engine) noexcept {
  return engine == Engine::kFast ? "fast" : "reference";
}

Engine parse_engine(std::string_view text) {
  if (text == "fast") return Engine::kFast;
  if (text == "reference") return Engine::kReference;
  refuse({"engine", "\"" + std::string(text) + "\"", "fast or reference", ""});
}

bool EditSettings::plain_arithmetic(const models::Model& model) const {
  return !tf32 && compute_dtype.value_or(model.dtype()) == model.dtype();
}

std::string EditSettings::arithmetic_name(const models::Model& model) const {
  return tf32 ? "tf32" : dtype_name(compute_dtype.value_or(model.dtype()));
}

EditSettings make_settings(const EditChoices& choices, const models::Model& model) {
  EditSettings settings{.seed = choices.seed,
                        .engine = choices.engine,
                        .contexts = choices.contexts,
                        .solve_dtype = choices.solve_dtype,
                        .compute_dtype = arithmetic_of(choices, model.dtype(), model.placement().devices()),
                        .tf32 = choices.compute_dtype == "tf32"};
  if (settings.tf32 && model.dtype() != at::kFloat)
    refuse({setting("compute_dtype"), "tf32 with a model in " + dtype_name(model.dtype()), "a float32 model",
            "TF32 is a way to multiply float32 matrices: choose it with " + setting("dtype", "float32")});
  const auto& layers = model.placement().layers;
  if (settings.tf32 && std::none_of(layers.begin(), layers.end(), [](c10::Device device) { return device.is_cuda(); }))
    refuse({setting("compute_dtype"), "tf32 for a model without a layer on an NVIDIA GPU", "auto, float32 or bfloat16",
            "TF32 is arithmetic of these GPUs: name one with " + setting("device_map")});
  if (settings.engine == Engine::kReference && !settings.plain_arithmetic(model))
    refuse({setting("compute_dtype"), choices.compute_dtype + " with " + setting("engine", "reference"), "auto",
            "the reference engine computes in the model's dtype; choose that with " + setting("dtype")});
  return settings;
}

}  // namespace emend::editors
