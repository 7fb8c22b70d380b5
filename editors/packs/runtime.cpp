#include <ATen/ATen.h>
#include <emend/core/json.h>
#include <emend/core/text.h>
#include <emend/editors/packs/runtime.h>
#include <emend/editors/registry.h>

#include <cmath>

namespace emend::editors {
namespace {

RuntimeEdit make_steer_runtime(const RuntimePart& part, const models::Model& model, const std::string& where) {
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
  return {.attach = [vector = std::move(vector), options = std::move(options), where](const models::Model& to) {
    return models::attach_steering(to, vector, options, where);
  }};
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

RuntimeEdit make_runtime(const RuntimePart& part, const models::Model& model, const std::string& where) {
  std::vector<RuntimeKind> kinds;
  for (const auto& editor : all_editors())
    if (editor.runtime) kinds.push_back(*editor.runtime);
  kinds.push_back({kSteerKind, 1, make_steer_runtime});
  std::string names;
  for (const auto& kind : kinds) {
    append_item(names, kind.name);
    if (kind.name != part.kind) continue;
    if (part.version > kind.version)
      throw Error(ErrorClass::kUnsupported, {where, part.kind + " version " + std::to_string(part.version),
                                             "at most " + std::to_string(kind.version), "use a newer emend"});
    try {
      return kind.make(part, model, where);
    } catch (const nlohmann::json::exception& error) {
      throw Error(ErrorClass::kCorruption, {where, part.kind + " values that cannot be read (" + reason_of(error) + ")",
                                            "the values that emend wrote", ""});
    }
  }
  throw Error(ErrorClass::kUnsupported,
              {where, "a runtime part of kind \"" + part.kind + "\"", "one of " + names, "use a newer emend"});
}

void RuntimeScope::add(const RuntimePart& part, const models::Model& model, const std::string& where) {
  RuntimeEdit edit = make_runtime(part, model, where);
  if (edit.attach) handles_.push_back(edit.attach(model));
  edits_.push_back(std::move(edit));
}

void RuntimeScope::clear() noexcept {
  while (!handles_.empty()) handles_.pop_back();
  edits_.clear();
}

std::string RuntimeScope::prefix(std::string_view prompt) const {
  std::string text;
  for (const auto& edit : edits_)
    if (edit.prefix) text += edit.prefix(prompt);
  return text;
}

at::Tensor detail::part_tensor(const RuntimePart& part, const std::string& name, const std::vector<int64_t>& sizes,
                               const std::string& where) {
  const auto found = part.tensors.find(name);
  bool fits = found != part.tensors.end() && found->second.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i)
    fits = sizes[i] < 0 || found->second.size(static_cast<int64_t>(i)) == sizes[i];
  if (fits) return found->second.clone();
  std::string shape;
  for (const int64_t size : sizes) append_item(shape, (size < 0 ? "any" : std::to_string(size)), ",");
  throw Error(
      ErrorClass::kCorruption,
      {where,
       part.kind + (found == part.tensors.end() ? " without tensor \"" : " with an ill-shaped tensor \"") + name + "\"",
       "[" + shape + "]", "get the pack again from where it came"});
}

void detail::append_row(at::Tensor& rows, const at::Tensor& row) {
  const at::Tensor added = row.detach().unsqueeze(0);
  rows = rows.defined() ? at::cat({rows, added}) : added.clone();
}

models::EditSite detail::part_site(const RuntimePart& part, const models::Model& model, const std::string& where) {
  const auto layer = part.values.at("layer").get<int64_t>();
  if (layer < 0 || layer >= model.n_layers())
    refuse({where, part.kind + " at layer " + std::to_string(layer),
            "a layer from 0 to " + std::to_string(model.n_layers() - 1), "use the model that the pack was made for"});
  const models::EditSite site = model.edit_site(static_cast<int>(layer));
  const auto shape = part.values.at("shape").get<std::vector<int64_t>>();
  if (shape != std::vector<int64_t>{site.out_features, site.in_features})
    refuse({where, part.kind + " for a matrix of another shape",
            std::to_string(site.out_features) + "×" + std::to_string(site.in_features),
            "use the model that the pack was made for"});
  return site;
}

std::vector<hooks::HookHandle> detail::attach_answer(
    const models::Model& model, hooks::Site in, hooks::Site out, int layer,
    std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> answer) {
  const auto keys = std::make_shared<at::Tensor>();
  std::vector<hooks::HookHandle> handles;
  handles.push_back(model.hooks().at({in, layer}).add([keys](const at::Tensor& x) {
    *keys = x.detach();
    return at::Tensor();
  }));
  handles.push_back(model.hooks().at({out, layer}).add([keys, answer = std::move(answer)](const at::Tensor& x) {
    return answer(std::exchange(*keys, at::Tensor()), x);
  }));
  return handles;
}

}  // namespace emend::editors
