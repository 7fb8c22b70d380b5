#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/models/detail/layers.h>
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

at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, Activation activation) {
  const bool in_place = !at::GradMode::is_enabled() && activation == Activation::kSilu;
  if (!in_place) return activate(gate, activation) * up;
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

// Router in float32, the best k experts of each token, renormalised weights.
at::Tensor apply_experts(const at::Tensor& x, const LayerWeights& weights, const ModelConfig& config, bool conv1d) {
  const at::Tensor scores = at::softmax(apply_linear(x, weights[Part::kRouter], conv1d), -1, at::kFloat);
  auto [best, chosen] = scores.topk(config.experts_per_token, -1);
  best = (best / best.sum(-1, /*keepdim=*/true)).to(x.scalar_type());
  at::Tensor sum = at::zeros_like(x);
  for (int64_t e = 0; e < config.n_experts; ++e) {
    const auto places = (chosen == e).nonzero();
    if (places.size(0) == 0) continue;
    const at::Tensor tokens = places.select(1, 0), slots = places.select(1, 1);
    const at::Tensor rows = x.index_select(0, tokens);
    const ExpertWeights& expert = weights.experts[e];
    const at::Tensor key =
        gated(apply_linear(rows, expert.gate, conv1d), apply_linear(rows, expert.up, conv1d), config.activation);
    const at::Tensor share = best.index({tokens, slots}).unsqueeze(1);
    sum = sum.index_add(0, tokens, apply_linear(key, expert.down, conv1d) * share);
  }
  return sum;
}

}  // namespace

at::Tensor apply_linear(const at::Tensor& x, const Linear& linear, bool conv1d) {
  const at::Tensor y = product(x, conv1d ? linear.weight.t() : linear.weight, linear.bias);
  return linear.adapter ? y + adapted(x, *linear.adapter) : y;
}

at::Tensor apply_norm(const at::Tensor& x, const Linear& weights, const ModelConfig& config) {
  if (config.norm == Norm::kRms) return rms_norm(x, weights.weight, config.norm_eps, config.norm_one_plus);
  return at::layer_norm(x, {x.size(-1)}, weights.weight, weights.bias, config.norm_eps);
}

at::Tensor apply_head_norm(const at::Tensor& x_Nhd, const at::Tensor& weight, const ModelConfig& config) {
  return rms_norm(x_Nhd, weight, config.norm_eps, config.norm_one_plus);
}

at::Tensor apply_mlp(const at::Tensor& x_ND, const LayerWeights& weights, const ModelConfig& config, bool conv1d,
                     const hooks::HookPoint& down_in, const hooks::HookPoint& down_out) {
  at::Tensor key_NF;
  switch (config.mlp) {
    case Mlp::kPlain:
      key_NF = activate(apply_linear(x_ND, weights[Part::kUp], conv1d), config.activation);
      break;
    case Mlp::kGated:
      key_NF = gated(apply_linear(x_ND, weights[Part::kGate], conv1d), apply_linear(x_ND, weights[Part::kUp], conv1d),
                     config.activation);
      break;
    case Mlp::kGatedFused: {
      const auto halves = apply_linear(x_ND, weights[Part::kGateUp], conv1d).chunk(2, -1);
      key_NF = gated(halves[0], halves[1], config.activation);
      break;
    }
    case Mlp::kExperts:
      return apply_experts(x_ND, weights, config, conv1d);
  }
  return down_out(apply_linear(down_in(std::move(key_NF)), weights[Part::kDown], conv1d));
}

}  // namespace emend::models::detail
