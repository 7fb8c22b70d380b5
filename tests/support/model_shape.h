// Sizes of a decoder without a checkpoint.
#pragma once

#include <emend/devices/memory_model.h>

#include <numeric>

namespace emend::testing {

/// Fills every byte count from the shape (projections without biases, two norms a layer).
inline void derive_bytes(devices::ModelShape& m) {
  const int64_t attention = m.hidden * m.head_dim * (2 * m.heads + 2 * m.kv_heads);
  const int64_t mlp = m.hidden * m.mlp_width * (m.gated_mlp ? 3 : 2);
  m.layer_bytes.assign(static_cast<size_t>(m.n_layers), (attention + mlp + 2 * m.hidden) * m.weight_bytes);
  m.embedding_bytes = m.vocab * m.hidden * m.weight_bytes;
  m.position_bytes = m.positions * m.hidden * m.weight_bytes;
  m.final_norm_bytes = m.hidden * m.weight_bytes;
  m.head_bytes = m.tied ? 0 : m.embedding_bytes;
}

/// Of all weights.
inline int64_t total_bytes(const devices::ModelShape& m) {
  return std::reduce(m.layer_bytes.begin(), m.layer_bytes.end(),
                     m.embedding_bytes + m.position_bytes + m.final_norm_bytes + m.head_bytes);
}

}  // namespace emend::testing
