// A low-rank addition to one linear layer, for fine-tuning and for running an adapter without merging it.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace emend::models {

/// y = x·Wᵀ + b + scale · dropout(x)·Aᵀ·Bᵀ (Hu et al. 2021). Attached with Model::set_adapter.
///   I input width · O output width · R rank
struct LinearAdapter {
  at::Tensor a_RI,
      b_OR;            ///< on the device of the weight, in the model's dtype or wider (results take the model's dtype)
  double scale = 1;    ///< lora_alpha / rank
  double dropout = 0;  ///< share of the inputs left out; only where `generator` is set
  /// CPU generator of the dropout masks; absent outside training. The masks do not depend on the device.
  mutable std::optional<at::Generator> generator;
};

}  // namespace emend::models
