// Small pieces of a block: norms, activations, MLPs.
#pragma once

#include <emend/hooks/hook_point.h>
#include <emend/models/detail/model_state.h>

namespace emend::models::detail {

/// The family's norm over the last dimension. Statistics are float32 at least.
[[nodiscard]] at::Tensor apply_norm(const at::Tensor& x, const Linear& weights, const ModelConfig& config);
/// RMS norm of each head of x [N, heads, d].
[[nodiscard]] at::Tensor apply_head_norm(const at::Tensor& x_Nhd, const at::Tensor& weight, const ModelConfig& config);

/// The MLP of a layer on packed rows [N, D]. Runs the hook points inside it.
[[nodiscard]] at::Tensor apply_mlp(const at::Tensor& x_ND, const LayerWeights& weights, const ModelConfig& config,
                                   bool conv1d, const hooks::HookTable& hooks, int layer);

}  // namespace emend::models::detail
