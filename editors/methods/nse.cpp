// NSE: Neuron-Level Sequential Editing for Large Language Models (Jiang et al., 2024).
//
//   1. z_i from the model with its original weights, however many batches were written (weights rewinding).
//   2. Up to max_iterations − 1 passes over the layers, each with the facts whose residual ‖z − current‖ lies between
//      alpha and upper_bound.
//   3. In each layer only influential neurons S are written: those with the largest Σ|k|, up to the share
//      neuron_threshold of the sum. ΔW_S = R·K_Sᵀ(λC_SS + ΣKpKpᵀ_SS + K_S·K_Sᵀ)⁻¹, ΔW = 0 elsewhere.
//
//   F key width (neurons) · S selected neurons · N facts
#include <ATen/ATen.h>
#include <emend/devices/route.h>
#include <emend/editors/key_cache.h>
#include <emend/editors/memit_family.h>
#include <emend/editors/original_weights.h>
#include <emend/editors/registry.h>

namespace emend::editors {
namespace {

struct NseHparams : MemitHparams {
  double alpha = 0;
  double upper_bound = 1e9;
  int64_t max_iterations = 3;
  double neuron_threshold = 1;
};

const hparams::Schema<NseHparams>& nse_schema() {
  static const auto schema =
      hparams::Schema<NseHparams>("nse")
          .include(memit_hparams_schema())
          .field("alpha", &NseHparams::alpha,
                 {.meaning = "facts with a residual of at most this size count as written", .min = 0})
          .field("upper_bound", &NseHparams::upper_bound,
                 {.meaning = "facts with a residual of at least this size are not written", .above = 0})
          .field("max_iterations", &NseHparams::max_iterations,
                 {.meaning = "passes over the layers; the last one only measures", .min = 2})
          .field("neuron_threshold", &NseHparams::neuron_threshold,
                 {.meaning = "share of the keys' size that the written neurons hold; 1 writes all",
                  .formula = "largest Σ|k| first, while their sum ≤ threshold · the whole",
                  .max = 1,
                  .above = 0})
          .check("upper_bound",
                 [](const NseHparams& h) -> std::string { return h.upper_bound > h.alpha ? "" : "more than alpha"; });
  return schema;
}

// Indices of the neurons to write, ascending; undefined for all of them.
at::Tensor influential(const at::Tensor& keys_FN, double share) {
  if (share >= 1) return {};
  const auto [scores_F, order_F] = keys_FN.abs().sum(1).sort(/*dim=*/0, /*descending=*/true);
  const int64_t count = scores_F.cumsum(0).le(share * scores_F.sum()).sum().item<int64_t>();
  return std::get<0>(order_F.narrow(0, 0, std::max<int64_t>(1, count)).sort());
}

class Nse final : public RememberingEditor {
 public:
  Nse(LocateRecipe recipe, const NseHparams& h)
      : RememberingEditor(std::move(recipe)), lambda_(h.mom2_update_weight), share_(h.neuron_threshold) {}

  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                EditContext& context) override {
    return originals_.during(model, recipe().common.layers, [&] { return LocateEditor::edit(model, facts, context); });
  }

  [[nodiscard]] LayerUpdate update(const LayerProblem& problem) const override {
    const EarlierKeys earlier = memory().layer(problem.index);
    const at::Tensor chosen_S = influential(problem.keys_FN, share_);
    if (!chosen_S.defined()) return closed_form(problem, earlier.with(preserved_of(problem, lambda_)));
    const auto rows = [&](const at::Tensor& x) { return x.defined() ? x.index_select(0, on(chosen_S, x)) : x; };
    const auto both = [&](const at::Tensor& x) { return x.defined() ? rows(x).index_select(1, on(chosen_S, x)) : x; };
    LayerProblem part = problem;
    part.keys_FN = rows(problem.keys_FN);
    if (problem.moment) part.moment = SecondMoment(both(problem.moment.cov_FF()));
    const EarlierKeys of_part{rows(earlier.keys_FP), both(earlier.sum_FF)};
    LayerUpdate update = closed_form(part, of_part.with(preserved_of(part, lambda_)));
    const at::Tensor adj_FN = at::zeros_like(problem.keys_FN);
    update.delta.right_FR = adj_FN.index_copy(0, chosen_S, update.delta.right_FR);
    return update;
  }

  void reset() override {
    RememberingEditor::reset();
    originals_.clear();
  }
  [[nodiscard]] std::map<std::string, at::Tensor> state() const override {
    auto state = RememberingEditor::state();
    originals_.save(state);
    return state;
  }
  void load_state(const std::map<std::string, at::Tensor>& saved) override {
    auto state = saved;
    originals_.load(state);
    RememberingEditor::load_state(state);
  }
  [[nodiscard]] const OriginalWeights* target_weights() const override { return &originals_; }

 private:
  static at::Tensor on(const at::Tensor& index, const at::Tensor& like) {
    return devices::route_like(index, like, devices::Purpose::kSolve);
  }

  double lambda_, share_;
  OriginalWeights originals_;
};

std::unique_ptr<Editor> make(const NseHparams& h, const hparams::RawHparams& raw, const models::Model& model,
                             const Log&) {
  LocateRecipe recipe = memit_family_recipe("nse", nse_schema().dump(h), h, model, raw);
  recipe.passes = {h.max_iterations - 1, h.alpha, h.upper_bound};
  return std::make_unique<Nse>(std::move(recipe), h);
}

}  // namespace

EditorInfo make_nse() {
  return editor_entry<NseHparams>("nse", "many batches, in passes, into the neurons that the facts use most",
                                  "Jiang et al., Neuron-Level Sequential Editing for Large Language Models, 2024",
                                  nse_schema(), make);
}

}  // namespace emend::editors
