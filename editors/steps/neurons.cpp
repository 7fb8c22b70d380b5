#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/locate.h>
#include <emend/editors/steps/neurons.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <emend/models/products.h>

#include <algorithm>

namespace emend::editors {
namespace {

using models::Part;

at::Tensor columns_at(const at::Tensor& places_E, int64_t width) {
  return at::one_hot(places_E, width).t().to(at::kDouble).contiguous();
}

void write(const WeightDelta& delta, EditTransaction& transaction, EditResult& result) {
  add_delta(delta, transaction, result).solver = kWholeNeurons;
}

void write_rows(const models::EditSite& site, const at::Tensor& places_E, const at::Tensor& rows_ED,
                EditTransaction& transaction, EditResult& result) {
  const at::Tensor old_ED =
      devices::to_host(oriented(transaction.model(), site)).index_select(0, places_E).to(at::kDouble);
  const at::Tensor change_ED = devices::to_host(rows_ED).to(at::kDouble) - old_ED;
  write(WeightDelta::factors(site, columns_at(places_E, site.out_features), change_ED.t().contiguous()), transaction,
        result);
}

}  // namespace

MlpWeights MlpWeights::of(const models::Model& model, int layer) {
  MlpWeights weights;
  weights.down = model.edit_site(layer);
  for (const auto& tensor : models::expected_tensors(model.family(), model.config())) {
    const bool fused = tensor.part == Part::kGateUp, gate = tensor.part == Part::kGate, up = tensor.part == Part::kUp;
    if (tensor.layer != layer || !(fused || gate || up)) continue;
    if (tensor.bias) {
      weights.biases.push_back(tensor.name);
      continue;
    }
    models::EditSite site{layer,
                          tensor.name,
                          "",
                          model.family().orientation,
                          weights.down.out_features,
                          weights.down.in_features * (fused ? 2 : 1)};
    weights.fused |= fused;
    (up ? weights.up : weights.gate) = site;
  }
  if (weights.gate.weight_name.empty()) std::swap(weights.gate, weights.up);
  return weights;
}

std::map<int, TextPass> TextPass::of(const models::Model& model, const models::Model& reader,
                                     const std::vector<std::vector<int64_t>>& rows, const std::vector<int>& layers,
                                     const EditContext& context) {
  const at::NoGradGuard no_grad;
  constexpr size_t kTokensAtOnce = 4096;
  std::map<int, TextPass> passes;
  std::map<int, std::vector<at::Tensor>> inputs;
  hooks::HookSession session(reader.hooks());
  for (const int layer : layers) {
    const at::Tensor home = solve_home(model, model.edit_site(layer));
    session.edit({hooks::Site::kMlpIn, layer}, [&inputs, layer, home](const at::Tensor& x) {
      inputs[layer].push_back(
          devices::route_like(x.to(at::kBFloat16, false, /*copy=*/true), home, devices::Purpose::kKeys));
      return at::Tensor();
    });
    session.edit({hooks::Site::kMlpDownIn, layer}, [&passes, layer, home](const at::Tensor& keys) {
      const at::Tensor sum_F = devices::route_like(keys.to(at::kDouble).square().sum(0), home, devices::Purpose::kKeys);
      at::Tensor& energy_F = passes[layer].energy_F;
      energy_F = energy_F.defined() ? energy_F + sum_F : sum_F;
      return at::Tensor();
    });
  }
  session.stop_after({hooks::Site::kMlpDownIn, *std::max_element(layers.begin(), layers.end())}).attach();
  const models::ForwardOptions no_logits{.hidden = {}, .logit_tokens = std::vector<int64_t>{}};
  for (size_t begin = 0; begin < rows.size();) {
    context.cancel.check("text");
    std::vector<std::vector<int64_t>> some;
    for (size_t tokens = 0; begin < rows.size() && (some.empty() || tokens + rows[begin].size() <= kTokensAtOnce);)
      tokens += rows[begin].size(), some.push_back(rows[begin++]);
    (void)reader.forward(models::TokenBatch::from_rows(some), no_logits);
  }
  session.finish();
  for (auto& [layer, pass] : passes) {
    pass.inputs_ND = at::cat(inputs[layer]);
    pass.energy_F = pass.energy_F / pass.inputs_ND.size(0);
  }
  return passes;
}

std::vector<int64_t> vacant_neurons(const models::Model& model, const MlpWeights& weights) {
  const int64_t width = weights.down.in_features;
  const at::Tensor gate_FD = oriented(model, weights.gate).narrow(0, 0, width), down_DF = oriented(model, weights.down);
  const at::Tensor vacant_F =
      devices::to_host((gate_FD == 0).all(1)).logical_and(devices::to_host((down_DF == 0).all(0)));
  const at::Tensor places = vacant_F.nonzero().squeeze(1).contiguous();
  return {places.const_data_ptr<int64_t>(), places.const_data_ptr<int64_t>() + places.numel()};
}

std::vector<int64_t> spare_neurons(const models::Model& model, const MlpWeights& weights, const TextPass& pass,
                                   size_t count, const std::set<int64_t>& used) {
  constexpr double kRare = 1e-3;
  const at::Tensor norm_F = oriented(model, weights.down).to(at::kDouble).square().sum(0);
  const at::Tensor share_F =
      devices::to_host(pass.energy_F * devices::route_like(norm_F, pass.energy_F, devices::Purpose::kKeys));
  const double least = kRare * share_F.median().item<double>();
  const at::Tensor order = share_F.argsort();
  std::vector<int64_t> places = vacant_neurons(model, weights);
  std::erase_if(places, [&](int64_t j) { return used.contains(j); });
  places.resize(std::min(places.size(), count));
  for (int64_t k = 0; k < order.numel() && places.size() < count; ++k) {
    const int64_t j = order[k].item<int64_t>();
    if (share_F[j].item<double>() >= least && !used.contains(j)) places.push_back(j);
  }
  if (places.size() < count)
    throw Error(ErrorClass::kInvalidArgument,
                {"layer " + std::to_string(weights.down.layer),
                 std::to_string(count) + " subjects for " + std::to_string(places.size()) + " spare neurons",
                 "at most as many subjects as the layer has neurons to spare", "name more `layers`"});
  return places;
}

void write_neurons(const MlpWeights& weights, const NewNeurons& neurons, EditTransaction& transaction,
                   EditResult& result) {
  const int64_t width = weights.down.in_features;
  const at::Tensor places_E = at::tensor(neurons.places, at::kLong);
  if (weights.fused) {
    write_rows(weights.gate, at::cat({places_E, places_E + width}), at::cat({neurons.gate_ED, neurons.up_ED}),
               transaction, result);
  } else {
    write_rows(weights.gate, places_E, neurons.gate_ED, transaction, result);
    if (weights.gated()) write_rows(weights.up, places_E, neurons.up_ED, transaction, result);
  }
  for (const auto& name : weights.biases) {
    const at::Tensor old = devices::to_host(transaction.model().weight(name)).to(at::kDouble);
    at::Tensor change = at::zeros_like(old);
    for (int64_t part = 0; part < old.size(0); part += width)
      change.index_copy_(0, places_E + part, -old.index_select(0, places_E + part));
    write(WeightDelta::as_stored(name, weights.down.layer, change), transaction, result);
  }
  const at::Tensor old_DE =
      devices::to_host(oriented(transaction.model(), weights.down)).index_select(1, places_E).to(at::kDouble);
  write(WeightDelta::factors(weights.down, devices::to_host(neurons.down_DE).to(at::kDouble) - old_DE,
                             columns_at(places_E, width)),
        transaction, result);
}

namespace {

// Σ c x xᵀ in float64, products in the rows' dtype.
at::Tensor gram(const at::Tensor& x_ND, const at::Tensor& c_N) {
  const at::Tensor scaled_ND = x_ND * c_N.to(x_ND.scalar_type()).unsqueeze(1);
  return models::product(x_ND.t().contiguous(), scaled_ND.t()).to(at::kDouble);
}

at::Tensor solve(const at::Tensor& chol_DD, const at::Tensor& b_D) {
  return at::cholesky_solve(b_D.unsqueeze(1), chol_DD).squeeze(1);
}

// Σ c x.
at::Tensor weighted_sum(const at::Tensor& x_ND, const at::Tensor& c_N) {
  return x_ND.t().mv(c_N.to(x_ND.scalar_type())).to(at::kDouble);
}

}  // namespace

GateFit::GateFit(at::Tensor rows_ND, at::Tensor usual_N, ThinnedText start, double ridge) {
  const at::NoGradGuard no_grad;
  if (!at::isfinite(rows_ND).all().item<bool>())
    throw Error(ErrorClass::kNumeric, {"gate", "a hidden state that is not finite", "finite numbers",
                                       "load the model in float32, or look for a damaged weight"});
  all_.x_ND = std::move(rows_ND);
  start_ = all_;
  usual_N_ = std::move(usual_N);
  if (start.step > 1) {
    const int64_t n = all_.x_ND.size(0);
    start_index_ = at::cat({at::arange(0, start.text, start.step, usual_N_.options().dtype(at::kLong)),
                            at::arange(start.text, n, usual_N_.options().dtype(at::kLong))});
    start_.x_ND = all_.x_ND.index_select(0, start_index_);
    const int64_t text = start_.x_ND.size(0) - (n - start.text);
    start_.scale_N = at::ones({start_.x_ND.size(0)}, usual_N_.options());
    start_.scale_N.narrow(0, 0, text).fill_(static_cast<double>(start.text) / static_cast<double>(text));
    usual_N_ = usual_N_.index_select(0, start_index_) * start_.scale_N;
  }
  const at::Tensor a_DD = gram(start_.x_ND, usual_N_);
  ridge_DD_ = at::eye(a_DD.size(0), a_DD.options()) * (a_DD.diagonal().mean() * ridge);
  chol_DD_ = at::linalg_cholesky(a_DD + ridge_DD_);
}

at::Tensor GateFit::reader(const at::Tensor& open_MD) const {
  const at::NoGradGuard no_grad;
  const at::Tensor x_MD = open_MD.to(at::kDouble);
  const int64_t m = x_MD.size(0);
  // (A + XᵀX/M)⁻¹Xᵀ1/M = A⁻¹Xᵀ(M + X A⁻¹Xᵀ)⁻¹1: the factor of A serves every gate.
  const at::Tensor z_DM = at::cholesky_solve(x_MD.t().contiguous(), chol_DD_);
  const at::Tensor gram_MM = x_MD.mm(z_DM) + at::eye(m, x_MD.options()) * m;
  return z_DM.mv(solve(at::linalg_cholesky(gram_MM), at::ones({m}, x_MD.options()))).to(at::kFloat);
}

at::Tensor GateFit::level() const {
  const at::NoGradGuard no_grad;
  return solve(chol_DD_, weighted_sum(start_.x_ND, usual_N_)).to(at::kFloat);
}

at::Tensor GateFit::newton(const Rows& rows, const at::Tensor& sign_N, const at::Tensor& weight_N, at::Tensor g_D,
                           int64_t steps) const {
  const at::Tensor counts_N = weight_N > 0;
  at::Tensor before_N;
  for (int64_t step = 0; step < steps; ++step) {
    at::Tensor within_N = rows.x_ND.mv(g_D.to(rows.x_ND.scalar_type())).mul_(sign_N.to(rows.x_ND.scalar_type())) < 1;
    within_N.logical_and_(counts_N);
    if (before_N.defined() && at::equal(within_N, before_N)) break;
    before_N = within_N;
    const at::Tensor index = within_N.nonzero().squeeze(1);
    const at::Tensor x_ND = rows.x_ND.index_select(0, index), c_N = weight_N.index_select(0, index);
    const at::Tensor y_N = sign_N.index_select(0, index);
    if (2 * x_ND.size(0) < x_ND.size(1)) {  // (XᵀCX + ρI)⁻¹XᵀCy = Xᵀ(XXᵀ + ρC⁻¹)⁻¹y
      const at::Tensor x = x_ND.to(at::kDouble);
      const at::Tensor gram_NN = x.mm(x.t()) + at::diag(ridge_DD_[0][0] / c_N);
      g_D = x.t().mv(solve(at::linalg_cholesky(gram_NN), y_N.to(at::kDouble)));
    } else {
      g_D = solve(at::linalg_cholesky(gram(x_ND, c_N) + ridge_DD_), weighted_sum(x_ND, c_N * y_N));
    }
  }
  return g_D;
}

at::Tensor GateFit::fit(const at::Tensor& sign_N, const at::Tensor& weight_N, int64_t steps) const {
  const at::NoGradGuard no_grad;
  const auto of_start = [&](const at::Tensor& x_N) {
    return start_index_.defined() ? x_N.index_select(0, start_index_) : x_N;
  };
  const at::Tensor sign = of_start(sign_N);
  at::Tensor weight = of_start(weight_N);
  if (start_.scale_N.defined()) weight = weight * start_.scale_N;
  // The usual weights' factor gives a first gate for nothing: as if all rows lay within the margin.
  at::Tensor g_D = newton(start_, sign, weight, solve(chol_DD_, weighted_sum(start_.x_ND, weight * sign)), steps);
  if (start_index_.defined()) g_D = newton(all_, sign_N, weight_N, g_D, steps);
  return g_D.to(at::kFloat);
}

}  // namespace emend::editors
