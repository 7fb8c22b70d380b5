#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/models/detail/decoder_pass.h>
#include <emend/models/products.h>

namespace emend::models::detail {
namespace {

// x / sqrt(mean(x²) + eps) · w. Written out: on a CPU this takes half the time of at::rms_norm.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool one_plus) {
  const bool narrow = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  const at::Tensor wide = narrow ? x.to(at::kFloat) : x;
  const at::Tensor scale = wide.square().mean(-1, /*keepdim=*/true).add_(eps).rsqrt_();
  at::Tensor normal = wide * scale;
  // Gemma multiplies by 1 + w in float32 and then casts; the others cast first.
  if (one_plus) return (normal * (1 + weight.to(normal.scalar_type()))).to(x.scalar_type());
  if (narrow) return normal.to(x.scalar_type()) * weight;
  return at::GradMode::is_enabled() ? normal * weight : normal.mul_(weight);
}

at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, Activation activation, bool gate_is_kept = false) {
  if (activation == Activation::kSilu && gate.dim() == 2 && gate.sizes() == up.sizes() && devices::own_kernels(gate))
    return devices::gated(gate, up, !gate_is_kept);
  const bool in_place = !at::GradMode::is_enabled() && activation == Activation::kSilu;
  if (!in_place || gate_is_kept) return activate(gate, activation) * up;
  at::Tensor key = gate;
  return (gate.is_contiguous() ? at::silu_(key) : at::silu(gate)).mul_(up);
}

// The adapter's share of a linear layer's output, in the dtype of x.
at::Tensor adapted(const at::Tensor& x, const LinearAdapter& adapter) {
  at::Tensor in = x.to(adapter.a_RI.scalar_type());
  if (adapter.generator && adapter.dropout > 0) {
    const at::Tensor keep =
        at::empty(in.sizes(), at::kFloat).bernoulli_(1 - adapter.dropout, adapter.generator) / (1 - adapter.dropout);
    in = in * devices::route_like(keep, in, devices::Purpose::kOther, devices::Dtype::kMatch);
  }
  return (at::linear(at::linear(in, adapter.a_RI), adapter.b_OR) * adapter.scale).to(x.scalar_type());
}

// What one expert is given and makes of it: the tokens that go there, their weights, its outputs.
struct ExpertShare {
  at::Tensor tokens, weights, out;
};

// The outputs of all experts side by side, [N, X, D], for hooks; what they leave goes back into the shares.
void show_experts(std::vector<ExpertShare>& shares, const at::Tensor& x, const hooks::HookPoint& point) {
  const auto n_experts = std::ssize(shares);
  at::Tensor all = at::zeros({x.size(0) * n_experts, x.size(1)}, x.options());
  for (int64_t e = 0; e < n_experts; ++e)
    if (const auto& share = shares[e]; share.out.defined())
      all = all.index_copy(0, share.tokens * n_experts + e, share.out);
  all = point(all.view({x.size(0), n_experts, x.size(1)})).flatten(0, 1);
  for (int64_t e = 0; e < n_experts; ++e)
    if (auto& share = shares[e]; share.out.defined()) share.out = all.index_select(0, share.tokens * n_experts + e);
}

// Router in float32, the best k experts of each token, renormalised weights.
at::Tensor apply_experts(const at::Tensor& x, const LayerWeights& weights, const ModelConfig& config, bool conv1d,
                         const hooks::HookPoint& at_router, const hooks::HookPoint& at_outputs) {
  const at::Tensor scores = at::softmax(at_router(apply_linear(x, weights[Part::kRouter], conv1d)), -1, at::kFloat);
  auto [best, chosen] = scores.topk(config.experts_per_token, -1);
  best = (best / best.sum(-1, /*keepdim=*/true)).to(x.scalar_type());
  std::vector<ExpertShare> shares(static_cast<size_t>(config.n_experts));
  for (int64_t e = 0; e < config.n_experts; ++e) {
    const auto places = (chosen == e).nonzero();
    if (places.size(0) == 0) continue;
    const at::Tensor tokens = places.select(1, 0), slots = places.select(1, 1);
    const at::Tensor rows = x.index_select(0, tokens);
    const ExpertWeights& expert = weights.experts[e];
    const at::Tensor key =
        gated(apply_linear(rows, expert.gate, conv1d), apply_linear(rows, expert.up, conv1d), config.activation);
    shares[e] = {tokens, best.index({tokens, slots}).unsqueeze(1), apply_linear(key, expert.down, conv1d)};
  }
  if (!at_outputs.idle()) show_experts(shares, x, at_outputs);
  at::Tensor sum = at::zeros_like(x);
  for (const auto& [tokens, share, out] : shares)
    if (out.defined()) sum = sum.index_add(0, tokens, out * share);
  return sum;
}

}  // namespace

at::Tensor apply_linear(const at::Tensor& x, const Linear& linear, bool conv1d) {
  const at::Tensor y = linear.packed ? linear.packed->product(x, linear.bias)
                                     : product(x, conv1d ? linear.weight.t() : linear.weight, linear.bias);
  return linear.adapter ? y + adapted(x, *linear.adapter) : y;
}

devices::SumAndNorm add_and_norm(at::Tensor x, const at::Tensor& added, const Linear& weights,
                                 const ModelConfig& config) {
  const bool rms = config.norm == Norm::kRms;
  if (const at::Tensor& w = weights.weight;
      rms && devices::own_kernels(x) && w.scalar_type() == x.scalar_type() && !devices::wants_gradient(w))
    return devices::add_rms_norm(x, added, w, config.norm_eps, config.norm_one_plus);
  if (added.defined()) x = x + added;
  if (rms) return {x, rms_norm(x, weights.weight, config.norm_eps, config.norm_one_plus)};
  return {x, at::layer_norm(x, {x.size(-1)}, weights.weight, weights.bias, config.norm_eps)};
}

at::Tensor apply_head_norm(const at::Tensor& x_Nhd, const at::Tensor& weight, const ModelConfig& config) {
  return rms_norm(x_Nhd, weight, config.norm_eps, config.norm_one_plus);
}

at::Tensor apply_mlp(const at::Tensor& x_ND, const LayerWeights& weights, const ModelConfig& config, bool conv1d,
                     const hooks::HookTable& hooks, int layer) {
  using hooks::Site;
  const auto point = [&](Site site) -> const hooks::HookPoint& { return hooks.point(site, layer); };
  const auto linear = [&](Part part) { return apply_linear(x_ND, weights[part], conv1d); };
  const auto gated_key = [&](at::Tensor gate, at::Tensor up) {
    gate = point(Site::kMlpGate)(std::move(gate));
    up = point(Site::kMlpUp)(std::move(up));
    return gated(gate, up, config.activation, !point(Site::kMlpGate).idle());
  };
  at::Tensor key_NF;
  switch (config.mlp) {
    case Mlp::kPlain:
      key_NF = activate(point(Site::kMlpUp)(linear(Part::kUp)), config.activation);
      break;
    case Mlp::kGated:
      key_NF = gated_key(linear(Part::kGate), linear(Part::kUp));
      break;
    case Mlp::kGatedFused: {
      const auto halves = linear(Part::kGateUp).chunk(2, -1);
      key_NF = gated_key(halves[0], halves[1]);
      break;
    }
    case Mlp::kExperts:
      return apply_experts(x_ND, weights, config, conv1d, point(Site::kRouter), point(Site::kExpertOut));
  }
  key_NF = point(Site::kMlpDownIn)(std::move(key_NF));
  return point(Site::kMlpDownOut)(apply_linear(key_NF, weights[Part::kDown], conv1d));
}

}  // namespace emend::models::detail
