// An editor of one's own: its hyper-parameters, its update, and its line in the table of editors.
//
// "nudge" moves the rewritten matrix of one layer so that each fact's key gives a little more of the target's
// embedding: ΔW = step · Σ e(target) kᵀ / ‖k‖². It is no good editor; it is the smallest one.
//
//   custom_editor MODEL
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/prompts.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/family.h>
#include <emend/models/placing.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/session.h>

#include <iostream>

namespace {

namespace datasets = emend::datasets;
namespace editors = emend::editors;
namespace hooks = emend::hooks;
namespace hparams = emend::hparams;
namespace models = emend::models;
using emend::Error;
using emend::ErrorClass;

struct NudgeHparams {
  int64_t layer = 1;
  double step = 1;
};

class Nudge final : public editors::Editor {
 public:
  explicit Nudge(const NudgeHparams& hparams) : hparams_(hparams) {}
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] nlohmann::json hparams() const override { return {{"layer", hparams_.layer}, {"step", hparams_.step}}; }

  // All or nothing: the transaction gives every byte back unless it is committed.
  [[nodiscard]] editors::EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                         const editors::EditContext& context) override {
    editors::EditTransaction scope(model, context.transaction);
    const auto site = model.edit_site(static_cast<int>(hparams_.layer));
    editors::EditResult result;
    result.editor = name_;
    result.hparams = hparams();
    at::Tensor values_DE, keys_FE;
    for (size_t i = 0; i < facts.size(); ++i) {
      context.cancel.check("nudge");
      if (context.progress) context.progress({"nudge", double(i), double(facts.size()), facts[i].subject});
      const auto [value_D, key_F] = change_for(model, facts[i], site);
      values_DE = i == 0 ? value_D.unsqueeze(1) : at::cat({values_DE, value_D.unsqueeze(1)}, 1);
      keys_FE = i == 0 ? key_F.unsqueeze(1) : at::cat({keys_FE, key_F.unsqueeze(1)}, 1);
      result.outcomes.emplace_back().case_id = facts[i].case_id;
    }
    result.deltas = {editors::WeightDelta::factors(site, values_DE, keys_FE)};
    editors::apply_delta(result.deltas[0], scope);
    scope.commit();
    return result;
  }

 private:
  // The two vectors whose product is added for one fact.
  [[nodiscard]] std::pair<at::Tensor, at::Tensor> change_for(const models::Model& model, const datasets::Fact& fact,
                                                             const models::EditSite& site) const {
    at::NoGradGuard no_gradients;
    const auto ids = model.tokenizer().encode_ids(fact.full_prompt(), true);
    const hooks::SiteRef key_site{hooks::Site::kMlpDownIn, site.layer};
    hooks::HookSession session(model.hooks());
    session.capture(key_site).stop_after(key_site).attach();
    model.forward(models::TokenBatch::from_rows({ids}));
    const at::Tensor key_F = session.captured(key_site)[-1].to(at::kDouble);
    session.finish();
    const auto target = editors::target_token_ids(model.tokenizer(), fact.full_prompt(), " " + fact.target_new).at(0);
    const at::Tensor embedding_D = model.weight(model.family().modules.embedding + ".weight")[target].to(at::kDouble);
    return {embedding_D * hparams_.step, key_F / key_F.square().sum()};
  }

  std::string name_ = "nudge";
  NudgeHparams hparams_;
};

// One declaration a field: parsing, defaults, ranges, help and reports come from it.
editors::EditorInfo nudge() {
  static const auto schema =
      hparams::Schema<NudgeHparams>("nudge")
          .field("layer", &NudgeHparams::layer, {.meaning = "layer whose matrix is changed", .min = 0})
          .field("step", &NudgeHparams::step, {.meaning = "size of the change", .above = 0});
  return editors::editor_entry("nudge", "moves one matrix towards the target's embedding", "this example", schema,
                               [](const NudgeHparams& h, const editors::RecipeInputs& in) {
                                 const int layers = in.model.n_layers();
                                 if (h.layer >= layers)
                                   throw Error(ErrorClass::kInvalidArgument,
                                               {in.raw.where("layer"), "layer " + std::to_string(h.layer),
                                                "less than " + std::to_string(layers), ""});
                                 return std::make_unique<Nudge>(h);
                               });
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2) return std::cerr << "usage: custom_editor MODEL\n", 2;
  editors::register_editor(nudge());
  auto model = models::load_placed(argv[1]);

  datasets::Fact fact;
  fact.prompt = "{} is in the city of";
  fact.subject = "The Eiffel Tower";
  fact.target_new = "Rome";
  const auto ids = model.tokenizer().encode_ids(fact.full_prompt(), true);
  const auto target = editors::target_token_ids(model.tokenizer(), fact.full_prompt(), " Rome").at(0);
  const auto logit = [&] {
    at::NoGradGuard no_gradients;
    return model.forward(models::TokenBatch::from_rows({ids})).logits[-1][target].item<double>();
  };

  const double before = logit();
  const auto raw = hparams::parse_hparams("layer: 2\nstep: 4", "custom_editor");
  emend::workflow::Session session(model, editors::make_editor("nudge", raw, model));
  session.edit({&fact, 1});
  std::cout << "logit of the target: " << before << " before, " << logit() << " after\n";
  session.undo();
  std::cout << (logit() == before ? "undone exactly" : "NOT UNDONE") << "\n";
  return logit() == before ? 0 : 1;
} catch (const Error& error) {
  std::cerr << error.what() << "\n";
  return exit_code(error.error_class());
}
