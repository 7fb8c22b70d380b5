// Base of the editors whose result lies beside the weights. An instance keeps its edits in force as long as it lives.
#pragma once

#include <emend/editors/editor.h>
#include <emend/editors/packs/runtime.h>
#include <emend/editors/steps/locate.h>

namespace emend::editors {

class RuntimeEditor : public NamedEditor {
 public:
  explicit RuntimeEditor(const RecipeInputs& in) : NamedEditor(in), model_(&in.model) {}

  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                const EditContext& context) final;
  [[nodiscard]] std::vector<RuntimePart> runtime() const override;
  [[nodiscard]] std::string prefix(std::string_view prompt) const override { return scope_.prefix(prompt); }
  [[nodiscard]] std::map<std::string, at::Tensor> state() const override;
  /// Also puts the loaded edits in force in the model that the editor was made for.
  void load_state(const std::map<std::string, at::Tensor>& state) override;

 protected:
  /// The part, of the kind name(), after these facts, given the one before (absent at first). No edit of this instance
  /// is in force meanwhile. Must fill the outcomes of the rendered facts and leave weights alone.
  [[nodiscard]] virtual RuntimePart learn(models::Model& model, std::span<const datasets::Fact> facts,
                                          const RenderedBatch& batch, const std::optional<RuntimePart>& before,
                                          const EditContext& context, EditResult& result) = 0;

 private:
  void put_in_force(std::optional<RuntimePart> part, const models::Model& model);

  const models::Model* model_;
  std::optional<RuntimePart> part_;
  RuntimeScope scope_;
};

/// Entry of such an editor E, made from its hyper-parameters and RecipeInputs. Its parts are of the kind `name`,
/// version 1, and come to life by `make_runtime`.
template <class E, class H>
[[nodiscard]] EditorInfo runtime_entry(const std::string& name, std::string summary, std::string paper,
                                       const hparams::Schema<H>& schema, decltype(RuntimeKind::make) make_runtime,
                                       bool trains = true) {
  EditorInfo info = training_entry<E>(name, std::move(summary), std::move(paper), schema);
  info.changes_weights = false;
  info.trains = trains;
  info.runtime = {name, 1, make_runtime};
  return info;
}

}  // namespace emend::editors
