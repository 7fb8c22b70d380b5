// The executor's view of the weights: by part, layer and expert, never by name.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/models/adapter.h>
#include <emend/models/family.h>

#include <array>
#include <memory>
#include <vector>

namespace emend::models::detail {

struct Linear {
  at::Tensor weight, bias;                            ///< undefined where the family has none
  std::shared_ptr<const LinearAdapter> adapter = {};  ///< usually null
};

struct PartTable {
  std::array<Linear, kParts> parts;
  [[nodiscard]] Linear& operator[](Part part) { return parts[static_cast<size_t>(part)]; }
  [[nodiscard]] const Linear& operator[](Part part) const { return parts[static_cast<size_t>(part)]; }
};

struct ExpertWeights {
  Linear gate, up, down;
};

struct LayerWeights : PartTable {
  std::vector<ExpertWeights> experts;
};

/// x·Wᵀ + b, or x·W + b for a Conv1D, on packed rows; plus the adapter's share.
[[nodiscard]] at::Tensor apply_linear(const at::Tensor& x, const Linear& linear, bool conv1d);

}  // namespace emend::models::detail
