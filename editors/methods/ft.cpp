// Fine-tuning of one MLP matrix in four forms, which differ in their defaults alone. Steps in finetune.h.
//
//   FT     without a limit: the baseline of the MEMIT repository (Meng et al., 2023, appendix)
//   FT-L   every entry kept within ε of its old value (Zhu et al., 2020; the constrained baseline of ROME and MEMIT);
//          all target tokens are scored at the last prompt position
//   FT-M   the loss that generation will be judged by: each target token after the ones before it, the prompt masked
//          out (EasyEdit's target_new objective; Zhang et al., 2024)
//   FT-W   a weight decay that depends on the number of facts, n^−0.87 e^0.156 (the FT-W baseline of MEMIT, whose code
//          drops the decay without a word because it tests for a tuple where JSON gives a list); a norm constraint may
//          be given as well
#include <emend/editors/steps/finetune.h>
#include <emend/editors/steps/training_loop.h>

#include <algorithm>

namespace emend::editors {
namespace {

struct FtHparams : FineTuneHparams {};
struct FtLHparams : FineTuneHparams {
  FtLHparams() { norm_constraint = 5e-4; }
};
struct FtMHparams : FineTuneHparams {
  FtMHparams() { objective_optimization = "target_new"; }
};
struct FtWHparams : FineTuneHparams {
  FtWHparams() { wd_power_law = {-0.87028798, 0.15589562}; }
};

class FineTuneEditor final : public NamedEditor {
 public:
  FineTuneEditor(FineTuneHparams hparams, const RecipeInputs& in) : NamedEditor(in), hparams_(std::move(hparams)) {
    check_finetune(hparams_, in.raw, in.model);
  }
  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                const EditContext& context) override {
    return edit_plain_prompts(*this, model, facts, context, [&](const RenderedBatch& batch, EditResult& result) {
      finetune(hparams_, name(), model, batch, context, result);
    });
  }

 private:
  FineTuneHparams hparams_;
};

// Beside the matrix its bias, or whatever else the module has.
bool trains_vectors(const models::Model& model, const nlohmann::json& values) {
  const std::string module = values.at("rewrite_module_tmp");
  return std::ranges::any_of(values.at("layers").get<std::vector<int>>(), [&](int layer) {
    return std::ranges::any_of(weights_of_module(model, layer, module, "fine-tuning"),
                               [&](const std::string& weight) { return model.weight(weight).dim() != 2; });
  });
}

template <class H>
EditorInfo ft_entry(const std::string& name, std::string summary, std::string paper) {
  static const auto schema = hparams::Schema<H>(name).include(finetune_schema());
  EditorInfo info = training_entry<FineTuneEditor>(name, std::move(summary), std::move(paper), schema);
  info.changes_vectors = trains_vectors;
  return info;
}

}  // namespace

EditorInfo make_ft() {
  return ft_entry<FtHparams>("ft", "fine-tuning of one MLP matrix without a limit",
                             "Meng et al., Mass-Editing Memory in a Transformer, ICLR 2023 (baseline)");
}

EditorInfo make_ft_l() {
  return ft_entry<FtLHparams>("ft-l", "fine-tuning within a box around the old weights",
                              "Zhu et al., Modifying Memories in Transformer Models, 2020; Meng et al., Locating "
                              "and Editing Factual Associations in GPT, NeurIPS 2022 (baseline)");
}

EditorInfo make_ft_m() {
  return ft_entry<FtMHparams>(
      "ft-m", "fine-tuning on the target's tokens after the prompt",
      "Zhang et al., A Comprehensive Study of Knowledge Editing for Large Language Models, 2024");
}

EditorInfo make_ft_w() {
  return ft_entry<FtWHparams>("ft-w", "fine-tuning with weight decay by the number of facts",
                              "Meng et al., Mass-Editing Memory in a Transformer, ICLR 2023 (baseline)");
}

}  // namespace emend::editors
