// NeuralDB's store: keys of one layer, and what is added to the layer's output where a token's key resembles one.
//   E entries · N tokens · F key width · D hidden width
#pragma once

#include <emend/editors/packs/runtime.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace emend::editors {

struct NeuralStore {
  at::Tensor keys_EF, residuals_ED;  ///< float32, host; undefined while empty
  std::vector<int64_t> case_ids;     ///< fact that made the entry
  double gamma = 0;                  ///< cosine above which an entry answers

  [[nodiscard]] int64_t size() const { return keys_EF.defined() ? keys_EF.size(0) : 0; }
  /// Appends an entry; one with the same key (to a thousandth of its length) is replaced. Returns its index.
  ///   key_F [F], residual_D [D]: any float dtype, host
  int64_t put(const at::Tensor& key_F, const at::Tensor& residual_D, int64_t case_id);
  /// As data for a pack. The store must not be empty.
  [[nodiscard]] RuntimePart part(int layer, const models::EditSite& site) const;
  /// Throws Error(kCorruption) naming `where` if tensors or values are missing or of other shapes.
  [[nodiscard]] static NeuralStore from(const RuntimePart& part, const models::EditSite& site,
                                        const std::string& where);
};

/// The entry with the largest cosine of each token [N], int64, and whether that is above gamma [N], bool:
///   j = argmax_e cos(k, k_e),  cos(k, k_j) > γ
///   query_NF [N,F], keys_EF [E,F]: one float dtype, one device
[[nodiscard]] std::pair<at::Tensor, at::Tensor> find_in_store(const at::Tensor& query_NF, const at::Tensor& keys_EF,
                                                              double gamma);

}  // namespace emend::editors
