// PRUNE: Perturbation-Restrained Sequential Model Editing (Ma et al., ICLR 2025), section 4.
//
//   1. Batches are written as by MEMIT.
//   2. Once, after the last batch, with W0 the original weight and ΔW = W − W0 = Σ σᵢ uᵢ vᵢᵀ the sum of all changes:
//      W ← W0 + Σ F(σᵢ) uᵢ vᵢᵀ,  F(σ) = log_α σ − log_α s + s for σ > s, else σ,  s = the largest singular value of W0.
//
// The restrained change replaces the old one. (A published re-implementation adds it to the edited weight.) Where s·ln
// α < 1, F would make values a little above s larger: they stay as they are.
//   D hidden width · F key width · R restrained directions
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/memit_family.h>
#include <emend/editors/original_weights.h>
#include <emend/editors/registry.h>

#include <cmath>

namespace emend::editors {
namespace {

struct PruneHparams : MemitHparams {
  double restraint_base = 2.718281828459045;
};

const hparams::Schema<PruneHparams>& prune_schema() {
  static const auto schema =
      hparams::Schema<PruneHparams>("prune")
          .include(memit_hparams_schema())
          .field("restraint_base", &PruneHparams::restraint_base,
                 {.meaning = "base of the logarithm that shortens large singular values; a larger one shortens more",
                  .formula = "α in F(σ) = log_α σ − log_α s + s for σ > s = σmax(W)",
                  .above = 1});
  return schema;
}

class Prune final : public LocateEditor {
 public:
  Prune(LocateRecipe recipe, const PruneHparams& h)
      : LocateEditor(std::move(recipe)), lambda_(h.mom2_update_weight), base_(h.restraint_base) {}

  [[nodiscard]] LayerUpdate update(const LayerProblem& problem) const override {
    return closed_form(problem, preserved_of(problem, lambda_));
  }

  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                EditContext& context) override {
    return originals_.during(model, recipe().common.layers, [&] { return LocateEditor::edit(model, facts, context); });
  }

  [[nodiscard]] std::optional<EditResult> finish(models::Model& model, EditContext& context) override {
    const at::NoGradGuard no_grad;
    EditTransaction transaction(model, context.transaction);
    EditResult result;
    result.editor = name();
    result.hparams = hparams();
    result.contexts = context.contexts;
    result.engine = context.engine;
    result.seed = context.seed;
    for (const int64_t layer : recipe().common.layers) {
      context.cancel.check("finish");
      restrain(model, model.edit_site(static_cast<int>(layer)), transaction, result);
    }
    transaction.commit();
    if (result.deltas.empty()) return std::nullopt;
    return result;
  }

  void reset() override { originals_.clear(); }
  [[nodiscard]] std::map<std::string, at::Tensor> state() const override {
    std::map<std::string, at::Tensor> state;
    originals_.save(state);
    return state;
  }
  void load_state(const std::map<std::string, at::Tensor>& saved) override {
    auto state = saved;
    originals_.load(state);
  }

 private:
  void restrain(const models::Model& model, const models::EditSite& site, EditTransaction& transaction,
                EditResult& result) const {
    const auto original = originals_.weights().find(site.weight_name);
    if (original == originals_.weights().end()) return;  // nothing was written
    const auto oriented = [&](const at::Tensor& stored) {
      const at::Tensor host = devices::to_host(stored, devices::Purpose::kSolve).to(at::kDouble);
      return site.orientation == models::Orientation::kInOut ? host.t() : host;
    };
    const at::Tensor original_DF = oriented(original->second);
    const at::Tensor change_DF = oriented(model.weight(site.weight_name)) - original_DF;
    const double limit = at::linalg_svdvals(original_DF).max().item<double>();
    const auto [u_DR, sigma_R, vt_RF] = at::linalg_svd(change_DF, /*full_matrices=*/false);
    const int64_t large = sigma_R.gt(limit).sum().item<int64_t>();
    if (large == 0) return;
    const at::Tensor sigma = sigma_R.narrow(0, 0, large);
    const at::Tensor restrained = at::minimum((sigma / limit).log() / std::log(base_) + limit, sigma);
    WeightDelta delta = WeightDelta::factors(site, u_DR.narrow(1, 0, large) * (restrained - sigma),
                                             vt_RF.narrow(0, 0, large).t().contiguous());
    const ApplyReport report = apply_delta(delta, transaction);
    LayerFigures figures = figures_of_write(site.layer, site.weight_name, report);
    figures.solver = "restrained " + std::to_string(large) + " directions";
    result.layers.push_back(std::move(figures));
    result.deltas.push_back(std::move(delta));
  }

  double lambda_, base_;
  OriginalWeights originals_;
};

std::unique_ptr<Editor> make(const PruneHparams& h, const hparams::RawHparams& raw, const models::Model& model,
                             const Log&) {
  return std::make_unique<Prune>(memit_family_recipe("prune", prune_schema().dump(h), h, model, raw), h);
}

}  // namespace

EditorInfo make_prune() {
  return editor_entry<PruneHparams>(
      "prune", "MEMIT in many batches; at the end the singular values of the whole change are restrained",
      "Ma et al., Perturbation-Restrained Sequential Model Editing, ICLR 2025", prune_schema(), make);
}

}  // namespace emend::editors
