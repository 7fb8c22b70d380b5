// Rotary position embedding in all its published forms.
//
// r rotated dimensions, inverse frequencies f_i (i = 0 … r/2-1), angle of token p: p·f_i. Half-split rotation turns the
// pairs (i, i + r/2), interleaved rotation the pairs (2i, 2i + 1). Frequencies, cosines and sines are float32 whatever
// the weights are, then cast, as the published implementations do.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/models/family.h>

namespace emend::models::detail {

struct RotaryFrequencies {
  at::Tensor inverse;  ///< [r/2] float32, CPU
  double attention_factor = 1;
};
/// For a text of `length` tokens (only some forms look at it).
[[nodiscard]] RotaryFrequencies rotary_frequencies(const Rotary& rotary, int64_t length);

struct RotaryTable {
  at::Tensor cos, sin;  ///< [N, 1, r]; sin carries the sign of its partner
  bool interleaved = false;
};
/// positions: one a token; lengths: one a row; row_begin: packed index of each row's first token, and the end.
[[nodiscard]] RotaryTable rotary_table(const Rotary& rotary, const std::vector<int64_t>& positions,
                                       const std::vector<int64_t>& lengths, const std::vector<int64_t>& row_begin);

/// x [N, heads, d] → the same, its first r dimensions rotated.
[[nodiscard]] at::Tensor apply_rotary(const at::Tensor& x_Nhd, const RotaryTable& table);

// Reading the rotary part of config.json, in both spellings.

/// The rotary form described by `dict` (a rope_parameters or rope_scaling object; possibly empty) with defaults from
/// the top level of `reader`. `dims` is filled in from the head size and the fraction.
[[nodiscard]] Rotary read_rotary(const ConfigReader& reader, const ConfigReader& dict, const ConfigKeys& keys,
                                 const ModelConfig& config);

/// The common case: one form for all layers, from rope_parameters or rope_scaling.
void read_common_rotary(const ConfigReader& reader, const ConfigKeys& keys, ModelConfig& config);

}  // namespace emend::models::detail
