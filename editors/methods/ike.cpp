// IKE: Can We Edit Factual Knowledge by In-Context Learning? (Zheng et al., EMNLP 2023).
//
//   The facts are kept as text. In front of a prompt stand the k edited facts that it resembles most, as demonstrations
//   "New Fact: … Prompt: …"; a prompt that resembles none more than `threshold` is asked as it is.
//
// No weight and no activation changes, and nothing is trained. The published method fills the demonstrations up with
// facts of a training set; here they are the edited facts themselves.
#include <emend/core/error.h>
#include <emend/editors/prompts.h>
#include <emend/editors/registry.h>
#include <emend/editors/runtime_editor.h>
#include <emend/editors/targets.h>

namespace emend::editors {
namespace {

struct IkeHparams {
  int64_t k = 4;
  double threshold = 0.5;
};

const hparams::Schema<IkeHparams>& ike_schema() {
  using H = IkeHparams;
  static const auto schema =
      hparams::Schema<H>("ike")
          .field("k", &H::k, {.meaning = "most facts told in front of a prompt", .min = 1})
          .field("threshold", &H::threshold,
                 {.meaning = "least similarity of prompt and fact",
                  .formula = "cosine of TF-IDF vectors",
                  .min = 0,
                  .max = 1})
          .unused("sentence_model_name", "similarity is that of TF-IDF vectors; no sentence encoder is loaded");
  return schema;
}

class Ike final : public RuntimeEditor {
 public:
  Ike(IkeHparams hparams, const models::Model& model)
      : RuntimeEditor("ike", "ike", ike_schema().dump(hparams), model), hparams_(hparams) {}

 protected:
  [[nodiscard]] RuntimePart learn(models::Model& model, std::span<const datasets::Fact> facts,
                                  const RenderedBatch& batch, const std::optional<RuntimePart>& before, EditContext&,
                                  EditResult& result) override {
    RuntimePart part;
    part.kind = "ike";
    part.values = {{"k", hparams_.k},
                   {"threshold", hparams_.threshold},
                   {"facts", before ? before->values.at("facts") : nlohmann::json::array()}};
    for (size_t i = 0; i < batch.rendered.size(); ++i) {
      const datasets::Fact& fact = facts[batch.places[i]];
      auto& list = part.values["facts"];
      const std::string prompt = fact.full_prompt();
      for (auto it = list.begin(); it != list.end(); ++it)
        if (it->at("prompt") == prompt) {  // the newer answer counts
          list.erase(it);
          break;
        }
      list.push_back({{"prompt", prompt}, {"target", fact.target_new}, {"case_id", fact.case_id}});
      Target target;
      target.status = FactStatus::kConverged;
      result.outcomes[batch.places[i]] = make_outcome(model.tokenizer(), batch.rendered[i], target);
    }
    return part;
  }

 private:
  IkeHparams hparams_;
};

}  // namespace

EditorInfo make_ike() {
  EditorInfo info = editor_entry<IkeHparams>(
      "ike", "no change at all: similar edited facts are told in front of a prompt",
      "Zheng et al., Can We Edit Factual Knowledge by In-Context Learning?, EMNLP 2023", ike_schema(),
      [](const IkeHparams& h, const hparams::RawHparams&, const models::Model& model, const Log&) {
        return std::make_unique<Ike>(h, model);
      });
  info.statistics = false;
  return info;
}

}  // namespace emend::editors
