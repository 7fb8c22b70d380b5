// Attention of few queries over many keys on a CPU: what writing token by token, and reading a few more tokens behind a
// cached beginning, spend their time in; and short texts that something is learned on.
#pragma once

#include <ATen/core/Tensor.h>

namespace emend::models::detail {

/// Whether attend_few takes these: in host memory, float32 or bfloat16, few queries (up to 8; where a gradient is
/// wanted 64), heads in whole groups.
[[nodiscard]] bool takes_few_queries(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd);

/// softmax(scale · q·k + mask) · v, keys and values read where they lie, products and sums in float32, each query by
/// itself: what else is in the batch, and how many threads there are, changes nothing. `mask` is added, [1 or B, 1 or
/// h, 1 or T, S]; undefined: none.
/// Returns [B, h, T, d] in the dtype of `q_BhTd`, with gradients for queries, keys and values.
[[nodiscard]] at::Tensor attend_few(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd,
                                    const at::Tensor& mask, double scale);

}  // namespace emend::models::detail
