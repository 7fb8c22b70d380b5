#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/editors/packs/steer_part.h>

#include <cmath>

namespace emend::editors {
namespace {

std::unique_ptr<RuntimeEdit> make_steer_runtime(const RuntimePart& part, const models::Model& model,
                                                const std::string& where) {
  models::ControlVector vector;
  for (const auto& [name, values] : part.tensors) {
    const int layer = number_in<int>(name.substr(name.find('.') + 1)).value_or(-1);
    if (!name.starts_with("direction.") || layer < 0)
      throw Error(ErrorClass::kCorruption, {where, "tensor \"" + name + "\"", "directions alone", ""});
    vector.layers[layer] = detail::part_tensor(part, name, {-1}, where).to(at::kFloat);
    vector.origin[layer] = part.values.at("origin").value(std::to_string(layer), 0.0);
  }
  models::SteerOptions options;
  options.strength = part.values.at("strength");
  options.by = part.values.at("by");
  options.decay = part.values.at("decay");
  if (!std::isfinite(options.strength) || options.decay < 0)
    throw Error(ErrorClass::kCorruption, {where, "a strength or decay that cannot be", "finite, and from 0 on", ""});
  models::require_steering(model, vector, options, where);
  return detail::hooked([vector = std::move(vector), options = std::move(options), where](const models::Model& to) {
    return models::attach_steering(to, vector, options, where);
  });
}

}  // namespace

RuntimePart steer_part(const models::ControlVector& vector, const models::SteerOptions& options) {
  RuntimePart part{.kind = kSteerKind,
                   .values = {{"strength", options.strength},
                              {"by", options.by},
                              {"decay", options.decay},
                              {"origin", nlohmann::json::object()}}};
  for (const auto& [layer, values] : vector.layers)
    if (options.layers.contains(layer)) part.tensors["direction." + std::to_string(layer)] = values;
  for (const auto& [layer, from] : vector.origin) part.values["origin"][std::to_string(layer)] = from;
  return part;
}

RuntimeKind steer_runtime() {
  return {kSteerKind, 1, make_steer_runtime};
}

}  // namespace emend::editors
