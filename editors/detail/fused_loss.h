// The loss at labelled tokens, computed with its gradient in slices so that no [tokens, vocabulary] tensor outlives a
// slice.
//   M labelled tokens · K KL rows · D hidden width · V vocabulary
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/models/model.h>

namespace emend::editors::detail {

struct LabelLoss {
  at::Tensor nll_M;    ///< −log p(label), as far as it is above the floor; work dtype, on the head's device
  at::Tensor hit_M;    ///< label is the argmax (bool); undefined unless asked for
  at::Tensor grad_MD;  ///< of Σ coefficient·nll with respect to the hidden rows; undefined without gradient
};

struct LossWants {
  bool gradient = true;
  bool hits = false;
};

/// `hidden_MD` residual stream at the labelled tokens (its autograd history is not touched); `labels_M`,
/// `coefficient_M` and `floor_M` (undefined: 0) on any device.
[[nodiscard]] LabelLoss label_loss(const models::Model& model, const at::Tensor& hidden_MD, const at::Tensor& labels_M,
                                   const at::Tensor& coefficient_M, const at::Tensor& floor_M, bool raw_head,
                                   const LossWants& wants);

struct DivergenceLoss {
  at::Tensor kl_K;     ///< KL(now ‖ first) of each row
  at::Tensor grad_KD;  ///< of Σ coefficient·kl
};

/// `first_KV` log-probabilities to compare with; if undefined, set from this pass.
[[nodiscard]] DivergenceLoss divergence_loss(const models::Model& model, const at::Tensor& hidden_KD,
                                             const at::Tensor& coefficient_K, at::Tensor& first_KV, bool gradient);

}  // namespace emend::editors::detail
