#include <ATen/ATen.h>
#include <emend/editors/detail/json_memory.h>
#include <emend/editors/steps/runtime_editor.h>
#include <emend/editors/steps/training_loop.h>

namespace emend::editors {

at::Tensor detail::bytes_of(const nlohmann::json& json) {
  const std::string text = json.dump();
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<uint8_t>());
  return bytes;
}

nlohmann::json detail::json_of(const at::Tensor& bytes) {
  const at::Tensor whole = bytes.to(at::kByte).contiguous();
  const auto* begin = whole.const_data_ptr<uint8_t>();
  return nlohmann::json::parse(begin, begin + whole.numel());
}

EditResult RuntimeEditor::edit(models::Model& model, std::span<const datasets::Fact> facts,
                               const EditContext& context) {
  return edit_plain_prompts(*this, model, facts, context, [&](const RenderedBatch& batch, EditResult& result) {
    scope_.clear();
    try {
      RuntimePart next = learn(model, facts, batch, part_, context, result);
      context.cancel.check("edit");
      put_in_force(std::move(next), model);
    } catch (...) {
      put_in_force(part_, model);
      throw;
    }
    model_ = &model;
  });
}

std::vector<RuntimePart> RuntimeEditor::runtime() const {
  return part_ ? std::vector<RuntimePart>{*part_} : std::vector<RuntimePart>{};
}

std::map<std::string, at::Tensor> RuntimeEditor::state() const {
  std::map<std::string, at::Tensor> state;
  if (!part_) return state;
  state = part_->tensors;
  state["values.json"] = detail::bytes_of(part_->values);
  return state;
}

void RuntimeEditor::load_state(const std::map<std::string, at::Tensor>& state) {
  if (state.empty()) return put_in_force(std::nullopt, *model_);
  const auto values = state.find("values.json");
  if (values == state.end())
    throw Error(ErrorClass::kCorruption, {name(), "a memory without values", "the memory that this editor saved", ""});
  RuntimePart part;
  part.kind = name();
  part.values = detail::json_of(values->second);
  part.tensors = state;
  part.tensors.erase("values.json");
  put_in_force(std::move(part), *model_);
}

void RuntimeEditor::put_in_force(std::optional<RuntimePart> part, const models::Model& model) {
  scope_.clear();
  if (part) scope_.add(*part, model, name());
  part_ = std::move(part);
}

}  // namespace emend::editors
