#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/locate_parts.h>
#include <emend/editors/steps/locate.h>
#include <emend/editors/steps/modifiers.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace emend::editors {

double anchor_norm(std::vector<double> norms) {
  for (const double norm : norms)
    if (!std::isfinite(norm))
      throw Error(ErrorClass::kNumeric, {"nas", "a target that is not finite", "finite targets of the first batch",
                                         "give nas_norm, or another first batch"});
  std::sort(norms.begin(), norms.end());
  norms.resize(norms.size() - norms.size() / 20);
  return std::accumulate(norms.begin(), norms.end(), 0.0) / static_cast<double>(std::max<size_t>(1, norms.size()));
}

at::Tensor anchored_target(const at::Tensor& initial_D, const at::Tensor& delta_D, const at::Tensor& mlp_D,
                           double norm) {
  const at::Tensor wanted_D = mlp_D + delta_D;
  const double length = wanted_D.norm().item<double>();
  if (length > 2 * norm || length == 0) return initial_D.clone();
  return initial_D - mlp_D + wanted_D * (norm / length);
}

void detail::anchor_targets(const std::vector<at::Tensor>& mlp, double& norm, std::vector<Target>& targets) {
  const auto good = [&](size_t i) { return targets[i].status != FactStatus::kFailed; };
  if (norm == 0) {
    std::vector<double> norms;
    for (size_t i = 0; i < targets.size(); ++i)
      if (good(i)) norms.push_back((mlp[i] + targets[i].delta_D[0]).norm().item<double>());
    norm = anchor_norm(norms);
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!good(i)) continue;
    Target& target = targets[i];
    target.target_D[0] = anchored_target(target.initial_D[0], target.delta_D[0], mlp[i], norm);
    if (at::equal(target.target_D[0], target.initial_D[0]))
      target.withheld =
          formatted("the value has norm %.4g, more than twice the anchor's %.4g, and is not written (nas)",
                    (mlp[i] + target.delta_D[0]).norm().item<double>(), norm);
  }
}

std::pair<at::Tensor, at::Tensor> leading_directions(const at::Tensor& weight_DF, double share) {
  const at::NoGradGuard no_grad;
  const auto [u_DR, sigma_R, vt_RF] = at::linalg_svd(weight_DF.to(at::kDouble), /*full_matrices=*/false);
  const at::Tensor held_R = sigma_R.square().cumsum(0) / sigma_R.square().sum();
  const int64_t count = std::min<int64_t>(held_R.lt(share).sum().item<int64_t>() + 1, sigma_R.size(0));
  return {u_DR.narrow(1, 0, count).contiguous(), vt_RF.narrow(0, 0, count).t().contiguous()};
}

at::Tensor outside(const at::Tensor& x, const at::Tensor& basis) {
  if (!basis.defined()) return x;
  const at::Tensor here = devices::route_like(basis, x, devices::Purpose::kSolve).to(x.scalar_type());
  return x - here.mm(here.t().mm(x));
}

std::vector<at::Tensor> names_share(const models::Model& model, const std::vector<int>& layers, double share,
                                    const EditContext& context) {
  const at::NoGradGuard no_grad;
  const auto names = datasets::load_bundled_facts().facts;
  const auto rows = mapped(render_batch(model, names, ContextTemplates::plain(), {}).rendered,
                           [](const RenderedFact& fact) { return fact.rows[0]; });
  const auto sites = mapped(layers, [](int layer) { return hooks::SiteRef{hooks::Site::kMlpDownIn, layer}; });
  return mapped(collect_at_lookup(model, rows, sites, context), [&](const at::Tensor& keys_NF) {
    return leading_directions(devices::to_host(keys_NF).t(), share).first;
  });
}

WeightDelta without_directions(const WeightDelta& delta, const at::Tensor& left_DK, const at::Tensor& right_FK) {
  WeightDelta left = delta;
  if (delta.low_rank()) {
    left.left_DR = outside(delta.left_DR, left_DK);
    left.right_FR = outside(delta.right_FR, right_FK);
  } else {
    left.dense_DF = outside(outside(delta.dense_DF, left_DK).t(), right_FK).t().contiguous();
  }
  return left;
}

WeightDelta modified(const Modifiers& modifiers, const LayerProblem& problem, const WeightDelta& delta) {
  const at::NoGradGuard no_grad;
  WeightDelta result = delta;
  if (modifiers.simie > 0) {
    Preserved memory;
    memory.ridge = modifiers.simie;
    const at::Tensor adj_FN = solve_keys(problem.keys_FN, problem.earlier.with(memory), {problem.dtype});
    const at::Tensor moved_DN =
        delta.low_rank() ? delta.left_DR.to(problem.dtype).mm(delta.right_FR.to(problem.dtype).t().mm(problem.keys_FN))
                         : delta.dense_DF.to(problem.dtype).mm(problem.keys_FN);
    result = WeightDelta::factors(problem.site, moved_DN, adj_FN);
  }
  if (modifiers.revive > 0) {
    EMEND_CHECK(problem.original_DF.defined() && modifiers.leading, "revive without the unedited weight");
    auto& known = *modifiers.leading;
    if (!known.contains(problem.layer))
      known.emplace(problem.layer, leading_directions(problem.original_DF, modifiers.revive));
    const auto& [left_DK, right_FK] = known.at(problem.layer);
    result = without_directions(result, left_DK, right_FK);
  }
  return result;
}

}  // namespace emend::editors
