// Base of the editors whose result lies beside the weights. An instance keeps its edits in force in the model as long
// as it lives.
#pragma once

#include <emend/editors/editor.h>
#include <emend/editors/packs/runtime.h>
#include <emend/editors/steps/locate.h>

#include <optional>
#include <string>

namespace emend::editors {

class RuntimeEditor : public Editor {
 public:
  RuntimeEditor(std::string name, std::string kind, nlohmann::json values, const models::Model& model)
      : name_(std::move(name)), kind_(std::move(kind)), values_(std::move(values)), model_(&model) {}

  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] nlohmann::json hparams() const override { return values_; }
  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                const EditContext& context) final;
  [[nodiscard]] std::vector<RuntimePart> runtime() const override;
  [[nodiscard]] datasets::FactSet asked(datasets::FactSet facts) const override {
    return scope_.with_prefixes(std::move(facts));
  }
  void reset() override;
  [[nodiscard]] std::map<std::string, at::Tensor> state() const override;
  /// Also puts the loaded edits in force in the model that the editor was made for.
  void load_state(const std::map<std::string, at::Tensor>& state) override;

 protected:
  /// The part after these facts, given the one before (absent at first). No edit of this instance is in force
  /// meanwhile. Must fill the outcomes of the rendered facts and leave weights alone.
  [[nodiscard]] virtual RuntimePart learn(models::Model& model, std::span<const datasets::Fact> facts,
                                          const RenderedBatch& batch, const std::optional<RuntimePart>& before,
                                          const EditContext& context, EditResult& result) = 0;

 private:
  void put_in_force(std::optional<RuntimePart> part, const models::Model& model);

  std::string name_, kind_;
  nlohmann::json values_;
  const models::Model* model_;
  std::optional<RuntimePart> part_;
  RuntimeScope scope_;
};

}  // namespace emend::editors
