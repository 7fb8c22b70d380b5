// What the editors beside the weights keep, as data for packs (RuntimePart) and back.
//   E entries · M memories · N tokens · F key width · D hidden width
#pragma once

#include <emend/editors/packs/runtime.h>

namespace emend::editors {

/// GRACE's codebook: keys with a radius, and the value that takes the place of the layer's output within it.
struct GraceBook {
  at::Tensor keys_EF, values_ED, radius_E;   ///< float32, host; undefined while empty
  std::vector<std::vector<int64_t>> labels;  ///< target ids of each entry
  std::vector<int64_t> case_ids;             ///< fact that made the entry

  [[nodiscard]] int64_t size() const { return keys_EF.defined() ? keys_EF.size(0) : 0; }
  /// Takes a fact in: finds or makes its entry as the paper's algorithm 1 does, widening or splitting radii.
  /// Returns the entry's index. `value_D` starts a new entry. `moving_average`: a key also goes halfway to the new one.
  int64_t admit(const at::Tensor& key_F, const at::Tensor& value_D, const std::vector<int64_t>& label, int64_t case_id,
                double radius, bool moving_average);

  [[nodiscard]] RuntimePart part(int layer, const models::EditSite& site) const;  ///< as data for a pack
  [[nodiscard]] static GraceBook from(const RuntimePart& part, const models::EditSite& site, const std::string& where);
};

/// Nearest entry of each token [N], int64, and whether the token lies within its radius [N], bool.
///   query_NF [N,F] any float dtype; keys_EF [E,F], radius_E [E]: all on one device
[[nodiscard]] std::pair<at::Tensor, at::Tensor> find_in_book(const at::Tensor& query_NF, const at::Tensor& keys_EF,
                                                             const at::Tensor& radius_E);

/// NeuralDB's store: keys of one layer, and what is added to the layer's output where a token's key resembles one.
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

/// WISE's side memories: changes of one matrix that only some tokens see.
struct WiseMemory {
  at::Tensor delta_DF;   ///< W' − W, float32, host, paper orientation
  double threshold = 0;  ///< a token takes this memory if ‖delta·k‖ is larger
  std::vector<int64_t> case_ids;
};

/// As data for a pack, and back; reading throws Error(kCorruption, kInvalidArgument) naming `where`.
[[nodiscard]] RuntimePart wise_part(const std::vector<WiseMemory>& memories, const models::EditSite& site);
[[nodiscard]] std::vector<WiseMemory> wise_memories(const RuntimePart& part, const models::EditSite& site,
                                                    const std::string& where);

}  // namespace emend::editors
