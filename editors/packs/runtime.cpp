#include <ATen/ATen.h>
#include <emend/core/json.h>
#include <emend/core/text.h>
#include <emend/editors/packs/runtime.h>
#include <emend/editors/packs/steer_part.h>
#include <emend/editors/registry.h>

namespace emend::editors {

std::vector<RuntimeKind> all_runtimes() {
  std::vector<RuntimeKind> kinds;
  for (const auto& editor : all_editors())
    if (editor.runtime) kinds.push_back(*editor.runtime);
  kinds.push_back(steer_runtime());
  return kinds;
}

std::unique_ptr<RuntimeEdit> make_runtime(const RuntimePart& part, const models::Model& model,
                                          const std::string& where) {
  std::string names;
  for (const auto& kind : all_runtimes()) {
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
  auto edit = make_runtime(part, model, where);
  handles_.push_back(edit->attach(model));
  edits_.push_back(std::move(edit));
}

void RuntimeScope::clear() noexcept {
  while (!handles_.empty()) handles_.pop_back();
  edits_.clear();
}

std::string RuntimeScope::prefix(std::string_view prompt) const {
  std::string text;
  for (const auto& edit : edits_) text += edit->prefix(prompt);
  return text;
}

namespace {

using Attach = std::function<std::vector<hooks::HookHandle>(const models::Model&)>;

class HookedEdit final : public RuntimeEdit {
 public:
  explicit HookedEdit(Attach attach) : attach_(std::move(attach)) {}
  [[nodiscard]] std::vector<hooks::HookHandle> attach(const models::Model& model) const override {
    return attach_(model);
  }

 private:
  Attach attach_;
};

}  // namespace

std::unique_ptr<RuntimeEdit> detail::hooked(Attach attach) {
  return std::make_unique<HookedEdit>(std::move(attach));
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
