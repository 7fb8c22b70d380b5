// EAMET: Embedding Alignment Model Editing in a Transformer ("Robust Massive Model Editing via Embedding Alignment
// Optimization", ybdai7/EAMET), as EasyEdit has it.
//
//   1. s_ij = cos(k_i, k_j) of the facts' keys in the last rewritten layer.
//   2. Targets one fact after the other, in their order. δ_i begins at ‖k_i‖·t0/‖t0‖. Beside MEMIT's loss it is to lie
//      to the earlier ones as its key does, with p = softmax_j(s_ij/τ), q = softmax_j(cos(δ_i, δ_j)/τ), j < i:
//        cs_factor·Σ p log(p/q)  +  mse_factor·Σ p'(s_ij − cos(δ_i, δ_j))², p' = p over the 50 largest s_ij
//      and v_weight_decay·‖δ‖/‖t0‖ in the place of ‖δ‖/‖t0‖².
//   3. Per layer MEMIT's ΔW = R·Kᵀ(λC + K·Kᵀ)⁻¹, with a λ a layer.
//
//   F key width · D hidden width · N facts · E earlier facts
#include <ATen/ATen.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/locate.h>

namespace emend::editors {
namespace {

struct EametHparams : SharedHparams {
  EametHparams() { v_stop_loss = 0.01; }
  std::vector<double> mom2_update_weight = {15000};
  double cs_factor = 1, mse_factor = 1, tau = 0.07;
  std::string delta_init = "target_init", weight_decay_method = "norm";
};

// Rows of length 1.
at::Tensor unit(const at::Tensor& x) {
  return x / x.norm(2, -1, /*keepdim=*/true).clamp_min(1e-12);
}

// How far the cosines of δ and the earlier ones are from those of the keys. `earlier_ED`: rows of length 1.
at::Tensor misalignment(const at::Tensor& delta_D, const at::Tensor& earlier_ED, const at::Tensor& keys_E,
                        const EametHparams& h) {
  constexpr int64_t kNearest = 50;
  constexpr double kEps = 1e-8;  // of the published logarithm
  const at::Tensor cosine_E = earlier_ED.mv(unit(delta_D));
  const at::Tensor p_E = at::softmax(keys_E / h.tau, 0), q_E = at::softmax(cosine_E / h.tau, 0);
  const at::Tensor order = (p_E * ((p_E + kEps) / (q_E + kEps)).log()).sum();
  const auto [near_K, at_K] = keys_E.topk(std::min(kNearest, keys_E.size(0)));
  const at::Tensor amount = (at::softmax(near_K / h.tau, 0) * (near_K - cosine_E.index_select(0, at_K)).square()).sum();
  return h.cs_factor * order + h.mse_factor * amount;
}

// Weight decay, and the alignment with the targets so far.
auto own_loss(const EametHparams& h, const std::vector<at::Tensor>& earlier, const at::Tensor& keys_E) {
  const at::Tensor earlier_ED = earlier.empty() ? at::Tensor() : unit(at::stack(earlier));
  return [h, earlier_ED, keys_E](const at::Tensor& delta_D, const at::Tensor& initial_D) {
    const auto here = [&](const at::Tensor& x) {
      return devices::route_like(x, delta_D, devices::Purpose::kLoss).to(delta_D.scalar_type());
    };
    const at::Tensor norm = delta_D.norm(), decay = norm / initial_D.norm() * h.v_weight_decay;
    if (!earlier_ED.defined()) return decay;
    const bool nowhere = norm.item<double>() == 0;  // no direction yet: the cosines' slope has no limit there
    return decay + misalignment(nowhere ? delta_D.detach() : delta_D, here(earlier_ED), here(keys_E), h);
  };
}

// Along t0, as long as the key.
auto start(double key_norm) {
  constexpr double kTooLong = 100;
  return [key_norm](const at::Tensor& initial_D) {
    const at::Tensor norm = initial_D.norm();
    return norm.item<double>() < kTooLong ? initial_D / norm * key_norm : at::zeros_like(initial_D);
  };
}

// One after the other; those that failed pull at nobody.
std::vector<Target> optimise_in_turn(const EametHparams& h, const models::Model& model,
                                     std::vector<TargetProblem> problems, const at::Tensor& keys_FN,
                                     const TargetSpec& spec, const EditContext& context) {
  const at::Tensor unit_NF = unit(keys_FN.t()), cosine_NN = unit_NF.mm(unit_NF.t());
  EditContext one = context;
  one.progress = {};
  std::vector<Target> targets;
  std::vector<at::Tensor> earlier;
  std::vector<int64_t> of_fact;
  for (size_t i = 0; i < problems.size(); ++i) {
    const auto n = static_cast<int64_t>(i);
    problems[i].own_loss = own_loss(h, earlier, cosine_NN[n].index_select(0, at::tensor(of_fact, at::kLong)));
    if (h.delta_init == "target_init") problems[i].start = start(keys_FN.select(1, n).norm().item<double>());
    targets.push_back(optimise_targets(model, {problems[i]}, spec, one)[0]);
    if (targets.back().status != FactStatus::kFailed) {
      earlier.push_back(targets.back().delta_D[0]);
      of_fact.push_back(n);
    }
    context.report("targets", i + 1, problems.size(), formatted("%zu/%zu facts", i + 1, problems.size()));
  }
  return targets;
}

LocateRecipe eamet_recipe(const EametHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = shared_recipe(h, in);
  recipe.targets.weight_decay = 0;  // in own_loss
  recipe.optimise = [h](const models::Model& model, std::vector<TargetProblem> problems, const at::Tensor& keys_FN,
                        const TargetSpec& spec, const EditContext& context) {
    return optimise_in_turn(h, model, std::move(problems), keys_FN, spec, context);
  };
  recipe.update = [lambdas = h.mom2_update_weight](const LayerProblem& problem) {
    return closed_form(problem, preserved_of(problem, lambdas[lambdas.size() == 1 ? 0 : problem.index]));
  };
  return recipe;
}

}  // namespace

EditorInfo make_eamet() {
  using H = EametHparams;
  static const auto schema =
      hparams::Schema<H>("eamet")
          .include(shared_hparams_schema())
          .field("mom2_update_weight", &H::mom2_update_weight,
                 "weight of what a layer already does: one for all layers, or one a layer",
                 {.formula = "lambda in dW = R Kt (lambda C + K Kt)^-1", .above = 0, .min_items = 1})
          .field("cs_factor", &H::cs_factor,
                 "weight of the order in which earlier targets resemble this one; 0 disables it",
                 {.formula = "times KL(p, q), p = softmax(cos(k, kj)/tau), q = softmax(cos(d, dj)/tau)", .min = 0})
          .field("mse_factor", &H::mse_factor,
                 "weight of how much they do, over the 50 whose keys are nearest; 0 disables it",
                 {.formula = "times sum p (cos(k, kj) - cos(d, dj))^2", .min = 0})
          .field("tau", &H::tau, "temperature of p and q", {.above = 0})
          .field("delta_init", &H::delta_init,
                 "where the change begins; target_init: along the hidden state, as long as the key, unless "
                 "the hidden state is longer than 100",
                 {.one_of = {"target_init", "zero"}})
          .field("weight_decay_method", &H::weight_decay_method,
                 "norm: weight decay and the limit relative to the hidden state; the authors' other form, "
                 "fix_ks, is not carried",
                 {.formula = "v_weight_decay |d| / |t0|", .one_of = {"norm"}})
          .unused("clamp_ks_factor", "of weight_decay_method fix_ks")
          .unused("norm_factor", "of weight_decay_method fix_ks")
          .unused("ks_bs", "read by no implementation")
          .check("mom2_update_weight", "one number, or one a layer", [](const H& h) {
            return h.mom2_update_weight.size() == 1 || h.mom2_update_weight.size() == h.layers.size();
          });
  return locate_entry("eamet", "MEMIT whose targets lie to each other as their keys do, optimised one after the other",
                      "EAMET: Robust Massive Model Editing via Embedding Alignment Optimization", schema, eamet_recipe);
}

}  // namespace emend::editors
