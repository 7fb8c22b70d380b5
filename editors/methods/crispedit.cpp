// CrispEdit: fine-tuning where the curvature of what the model does with ordinary text leaves room (arXiv 2602.15823,
// zarifikram/CrispEdit).
//
//   1. A, B: K-FAC of the text's loss in each trained matrix (curvature.h), once, on the unedited model.
//   2. FT-M with every gradient cut to the directions in which that curvature is small:  G ← U_B((U_Bᵀ G U_A) ∘ M)U_Aᵀ
//   3. After a batch the curvature of its facts, as the edited model has it, joins A and B, token by token.
//
// Adam scales each entry by itself, so its step is not quite in the subspace that its gradient is in. That is as
// published.
//
//   F key width · D hidden width
#include <ATen/ATen.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/curvature.h>
#include <emend/editors/steps/finetune.h>
#include <emend/editors/steps/training_loop.h>

namespace emend::editors {
namespace {

struct CrispHparams : FineTuneHparams {
  CrispHparams() {
    batch_size = 32;
    objective_optimization = "target_new";
  }
  double energy_threshold = 0.8;
  int64_t text_tokens = 8192;
  std::string edit_cache_style = "sequential";
};

// What a run knows of every layer, by its place in `layers`.
using Curvatures = std::vector<Curvature>;

class CrispEditor final : public NamedEditor {
 public:
  CrispEditor(CrispHparams hparams, const RecipeInputs& in) : NamedEditor(in), h_(std::move(hparams)) {}

  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                const EditContext& context) override {
    return edit_plain_prompts(*this, model, facts, context, [&](const RenderedBatch& batch, EditResult& result) {
      Curvatures known = known_.empty() ? of_text(model, context, result) : known_;
      EditTransaction transaction(model, context.transaction);
      EditContext inside = context;
      inside.transaction = &transaction;
      finetune(h_, name(), model, batch, inside, result, rule(model, known));
      if (h_.edit_cache_style == "sequential") {
        const auto rows = learning_rows(batch, 0, std::ssize(batch.rendered), Objective::kTargetNew);
        const Curvatures facts_own = curvature_of(model, rows, layers(), context);
        for (size_t i = 0; i < known.size(); ++i) known[i] = known[i].with(facts_own[i]);
      }
      context.cancel.check("edit");
      transaction.commit();
      known_ = std::move(known);
    });
  }

  [[nodiscard]] std::map<std::string, at::Tensor> state() const override {
    std::map<std::string, at::Tensor> state;
    for (size_t i = 0; i < known_.size(); ++i)
      for (auto& [name, value] : tensors(known_[i])) state[name + "." + std::to_string(i)] = value;
    return state;
  }
  void load_state(const std::map<std::string, at::Tensor>& state) override {
    Curvatures known;
    for (size_t i = 0; i < h_.layers.size() && !state.empty(); ++i)
      known.push_back(curvature([&](const std::string& part) {
        const auto found = state.find(part + "." + std::to_string(i));
        if (found != state.end()) return found->second;
        throw Error(ErrorClass::kCorruption,
                    {"memory of " + name(), "no " + part + " of layer " + std::to_string(h_.layers[i]),
                     "what an edit of these layers kept", ""});
      }));
    known_ = std::move(known);
  }

 private:
  [[nodiscard]] std::vector<int> layers() const { return {h_.layers.begin(), h_.layers.end()}; }

  static std::map<std::string, at::Tensor> tensors(const Curvature& one) {
    return {{"inputs", one.inputs_FF},
            {"gradients", one.gradients_DD},
            {"tokens", at::scalar_tensor(one.tokens, at::kDouble)}};
  }
  static Curvature curvature(const std::function<at::Tensor(const std::string& name)>& part) {
    return {part("inputs").to(at::kDouble), part("gradients").to(at::kDouble), part("tokens").item<double>()};
  }

  // Of ordinary text, with the model as it is before the first batch.
  Curvatures of_text(const models::Model& model, const EditContext& context, EditResult& result) const {
    const PhaseTimer timer(result, "statistics");
    std::vector<std::vector<int64_t>> text;
    if (!context.sharing.alone())
      text = text_rows(model, h_.text_tokens, context);  // by all, whatever each one has kept
    const auto make = [&](const std::vector<int>& missing) {
      const auto rows = text_learning_rows(context.sharing.alone() ? text_rows(model, h_.text_tokens, context) : text);
      const Curvatures made = curvature_of(model, rows, missing, context);
      StatisticsProvider::Kept kept;
      for (size_t i = 0; i < missing.size(); ++i) kept[missing[i]] = tensors(made[i]);
      return kept;
    };
    const std::string what = "curvature, " + std::to_string(h_.text_tokens) + " tokens";
    const auto kept = context.statistics ? context.statistics->kept(model, what, layers(), make) : make(layers());
    Curvatures known;
    for (const int layer : layers())
      known.push_back(curvature([&](const std::string& part) { return kept.at(layer).at(part); }));
    return known;
  }

  // Each weight's gradient, as it is stored, without what the curvature protects.
  [[nodiscard]] GradientRule rule(const models::Model& model, const Curvatures& known) const {
    std::map<std::string, FlatDirections> flat;
    for (size_t i = 0; i < known.size(); ++i)
      flat.emplace(model.edit_site(layers()[i]).weight_name, FlatDirections::of(known[i], h_.energy_threshold));
    const bool turned = model.edit_site(layers()[0]).orientation == models::Orientation::kInOut;
    return [flat = std::move(flat), turned](const std::string& weight, const at::Tensor& gradient) {
      const FlatDirections& directions = flat.at(weight);
      return turned ? directions.project(gradient.t()).t().contiguous() : directions.project(gradient);
    };
  }

  CrispHparams h_;
  Curvatures known_;
};

// The file may name the rewritten matrix, also with the ".weight" that the authors' files have.
std::unique_ptr<Editor> new_crispedit(const CrispHparams& h, const RecipeInputs& in) {
  const auto& [name, values, model, raw, log] = in;
  CrispHparams own = h;
  std::string& module = own.modules.rewrite_module_tmp;
  if (module.ends_with(".weight")) module.resize(module.size() - std::string_view(".weight").size());
  check_finetune(own, raw, model);
  for (const int64_t layer : own.layers) {
    const std::string weight = model.edit_site(static_cast<int>(layer)).weight_name;
    if (weights_of_module(model, static_cast<int>(layer), module, raw.source()).at(0) != weight)
      throw Error(ErrorClass::kUnsupported, {raw.where("rewrite_module_tmp"), "\"" + module + "\"", weight,
                                             "the curvature is that of MLP output matrices"});
  }
  return std::make_unique<CrispEditor>(std::move(own), in);
}

}  // namespace

EditorInfo make_crispedit() {
  using H = CrispHparams;
  static const auto schema =
      hparams::Schema<H>("crispedit")
          .include(finetune_schema())
          .field("energy_threshold", &H::energy_threshold, "share of the curvature that is protected",
                 {.formula = "M: eigenvalues of A x B below the largest ones that hold this share of their sum",
                  .above = 0})
          .field("text_tokens", &H::text_tokens, "tokens of ordinary text that the curvature is taken from",
                 {.min = 64})
          .field("edit_cache_style", &H::edit_cache_style,
                 "whether the curvature of a batch's facts is protected from the next ones",
                 {.one_of = {"sequential", "disable"}})
          .unused("mom2_dataset", "the corpus is given on the command line")
          .unused("mom2_n_samples", "text_tokens says how much is read")
          .unused("mom2_dtype", "sums are float64")
          .check("energy_threshold", "less than 1: with all of the curvature protected nothing is learned",
                 [](const H& h) { return h.energy_threshold < 1; })
          .check("objective_optimization", "target_new, as the authors train",
                 [](const H& h) { return h.objective_optimization == "target_new"; });
  EditorInfo info = editor_entry("crispedit", "fine-tuning in the directions that ordinary text does not feel",
                                 "CrispEdit, 2026 (arXiv 2602.15823)", schema, new_crispedit);
  info.trains = true;
  return info;
}

}  // namespace emend::editors
