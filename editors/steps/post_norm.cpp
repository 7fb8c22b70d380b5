#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/post_norm.h>
#include <emend/editors/steps/solver.h>
#include <emend/models/config.h>
#include <emend/models/family.h>

namespace emend::editors {
namespace {

constexpr int kBisections = 80;  // more than a float64 holds

// u minimising ‖g⊙u − t‖ with ‖u‖² = size and, if centred, Σu = 0: u = (g⊙t − ν)/(g² + μ) with the one μ above −min g²
// that gives the length, which falls in μ.
at::Tensor nearest_on_sphere(const at::Tensor& gain_D, const at::Tensor& t_ND, const at::Tensor& size_N1,
                             bool centred) {
  const at::Tensor squares_D = gain_D.square(), gt_ND = gain_D * t_ND;
  const auto at_mu = [&](const at::Tensor& mu_N1) {
    const at::Tensor inverse_ND = 1.0 / (squares_D + mu_N1);
    at::Tensor u_ND = gt_ND * inverse_ND;
    if (centred) u_ND = u_ND - inverse_ND * (u_ND.sum(1, true) / inverse_ND.sum(1, true));
    return u_ND;
  };
  const double least = squares_D.min().item<double>(), most = squares_D.max().item<double>();
  at::Tensor low_N1 = at::full_like(size_N1, -least + 1e-12 * most);
  // There ‖u‖ ≤ ‖g⊙t‖/(μ + min g²) ≤ √size.
  at::Tensor high_N1 = gt_ND.norm(2, 1, true) / size_N1.sqrt() + 1e-12 * most;
  for (int i = 0; i < kBisections; ++i) {
    const at::Tensor middle_N1 = 0.5 * (low_N1 + high_N1);
    const at::Tensor too_long = at_mu(middle_N1).square().sum(1, true) > size_N1;
    low_N1 = at::where(too_long, middle_N1, low_N1);
    high_N1 = at::where(too_long, high_N1, middle_N1);
  }
  const at::Tensor u_ND = at_mu(high_N1);
  return u_ND * (size_N1.sqrt() / u_ND.norm(2, 1, true).clamp_min(1e-30));
}

}  // namespace

PostNorm::PostNorm(const models::Model& model, int layer) {
  const auto& config = model.config();
  EMEND_CHECK(config.mlp_post_norm(), "a family with a norm after the MLP");
  centred_ = config.norm == models::Norm::kLayer;
  const bool whole_sum = config.norm_order == models::NormOrder::kPost;
  eps_ = config.norm_eps;
  const models::Part part = whole_sum ? models::Part::kMlpNorm : models::Part::kMlpPostNorm;
  const auto on_host = [&](const std::string& name) {
    return devices::to_host(model.weight(name).detach()).to(at::kDouble);
  };
  for (const auto& tensor : model.weight_table()) {
    if (tensor.layer != layer || tensor.part != part) continue;
    (tensor.bias ? bias_D_ : gain_D_) = on_host(tensor.name);
  }
  EMEND_CHECK(gain_D_.defined(), "the layer's norm");
  if (config.norm_one_plus) gain_D_ = gain_D_ + 1;
  if (!bias_D_.defined()) bias_D_ = at::zeros_like(gain_D_);
  sites_ = {{hooks::Site::kMlpDownOut, layer}};
  if (whole_sum) sites_.push_back({hooks::Site::kMlpIn, layer});
}

PostNorm::Parts PostNorm::parts(const std::vector<at::Tensor>& values_ND) const {
  EMEND_CHECK(values_ND.size() == sites_.size(), "values of all sites");
  const auto like = [&](const at::Tensor& x) { return routed(x, values_ND[0], values_ND[0].scalar_type()); };
  Parts parts{like(gain_D_), like(bias_D_), {}, {}, values_ND[0]};
  if (values_ND.size() > 1) parts.input_ND = parts.input_ND + like(values_ND[1]);
  parts.mean_N1 = centred_ ? parts.input_ND.mean(1, true) : at::zeros_like(parts.input_ND.mean(1, true));
  parts.size_N1 = (parts.input_ND - parts.mean_N1).square().mean(1, true);
  return parts;
}

at::Tensor PostNorm::apply(const std::vector<at::Tensor>& values_ND) const {
  const at::NoGradGuard no_grad;
  const Parts p = parts(values_ND);
  return (p.input_ND - p.mean_N1) * (p.size_N1 + eps_).rsqrt() * p.gain_D + p.bias_D;
}

at::Tensor PostNorm::layer_output(const std::vector<at::Tensor>& values_ND, const at::Tensor& output_ND,
                                  const at::Tensor& changed_ND) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> changed = values_ND;
  changed[0] = changed_ND;
  // Behind a norm of x + m nothing of the old output is left.
  return sites_.size() > 1 ? apply(changed) : output_ND - apply(values_ND) + apply(changed);
}

at::Tensor PostNorm::change_for(const std::vector<at::Tensor>& values_ND, const at::Tensor& wanted_ND) const {
  const at::NoGradGuard no_grad;
  const Parts p = parts(values_ND);
  const at::Tensor wanted =
      devices::route_like(wanted_ND, p.input_ND, devices::Purpose::kSolve).to(p.input_ND.scalar_type());
  const at::Tensor length_N1 = p.size_N1 / (p.size_N1 + eps_) * static_cast<double>(p.input_ND.size(1));
  const at::Tensor u_ND = nearest_on_sphere(p.gain_D, wanted - p.bias_D, length_N1, centred_);
  return p.mean_N1 + u_ND * (p.size_N1 + eps_).sqrt() - p.input_ND;
}

}  // namespace emend::editors
