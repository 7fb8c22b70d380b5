// GRACE's codebook: keys with a radius, and the value that takes the place of the layer's output within it.
//   E entries · N tokens · F key width · D hidden width
#pragma once

#include <emend/editors/packs/runtime.h>

#include <cstdint>
#include <vector>

namespace emend::editors {

struct GraceBook {
  at::Tensor keys_EF, values_ED, radius_E;   ///< float32, host; undefined while empty
  std::vector<std::vector<int64_t>> labels;  ///< target ids of each entry
  std::vector<int64_t> case_ids;             ///< fact that made the entry

  [[nodiscard]] int64_t size() const { return keys_EF.defined() ? keys_EF.size(0) : 0; }
  /// Takes a fact in: finds or makes its entry as the paper's algorithm 1 does, widening or splitting radii.
  /// Returns the entry's index. `value_D` starts a new entry. `moving_average`: a key also moves halfway to the new
  /// one.
  int64_t admit(const at::Tensor& key_F, const at::Tensor& value_D, const std::vector<int64_t>& label, int64_t case_id,
                double radius, bool moving_average);

  [[nodiscard]] RuntimePart part(int layer, const models::EditSite& site) const;  ///< as data for a pack
  [[nodiscard]] static GraceBook from(const RuntimePart& part, const models::EditSite& site, const std::string& where);
};

/// What decides at one layer. Tensors on the layer's device.
struct GraceLookup {
  at::Tensor keys_EF, radius_E;
  /// Nearest entry of each token [N], and whether the token lies within its radius [N].
  [[nodiscard]] std::pair<at::Tensor, at::Tensor> find(const at::Tensor& query_NF) const;
};

/// Hooks at a layer that replace outputs by rows of `values` (called at every pass; may carry gradients).
[[nodiscard]] std::vector<hooks::HookHandle> attach_grace(const models::Model& model, int layer, GraceLookup lookup,
                                                          std::function<at::Tensor()> values_ED);

}  // namespace emend::editors
