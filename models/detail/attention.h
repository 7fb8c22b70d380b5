// Attention over packed rows, with or without earlier tokens from a cache.
//
// The layout is decided once per pass (AttentionLayout) and shared by all layers; what lives on a device (indices,
// masks) is made once per device and window (AttentionTables). Rows of equal length are only reshaped; rows of
// different length are unpacked to the longest by a gather whose gradient is again a gather.
#pragma once

#include <emend/models/batch.h>
#include <emend/models/config.h>
#include <emend/models/kv_cache.h>

#include <functional>
#include <map>

namespace emend::models::detail {

/// Where the keys of a pass come from.
enum class KeySource {
  kOwn,     ///< no earlier tokens
  kJoined,  ///< the cache's keys, then the batch's own: [0, prefix) and [prefix, prefix + own)
  kCache,   ///< the cache, into which the own keys have been written: row r's tokens are contiguous
};

struct AttentionLayout {
  AttentionLayout(const TokenBatch& batch, const KvCache* cache, KeySource source);

  int64_t rows, longest;
  KeySource source;
  std::vector<int64_t> own;     ///< tokens a row in this batch
  std::vector<int64_t> prefix;  ///< tokens a row in the cache
  int64_t longest_prefix = 0;
  int64_t key_slots = 0;  ///< width of the key axis
  bool equal_own = true;  ///< all rows have the same number of own tokens
  bool equal_prefix = true;
  bool has_padding = false;   ///< some own tokens are kept padding: nobody but themselves may see them
  std::vector<bool> padding;  ///< [N]
  std::vector<int64_t> row_begin;

  /// Additive mask [1 or B, 1 or heads, T or 1, S] on the CPU, or undefined if none is needed. `causal` is set instead
  /// where a plain causal mask does. Masked slots are -inf; every query sees at least one slot.
  [[nodiscard]] at::Tensor make_mask(const ModelConfig& config, int64_t window, at::ScalarType dtype,
                                     bool& causal) const;
};

/// The parts of a layout that live on one device.
struct AttentionTables {
  at::Tensor unpack_index;  ///< [B·T] packed token of each slot; a row's padding repeats its last token
  at::Tensor pack_index;    ///< [N] slot of each token
  struct Mask {
    at::Tensor mask;
    bool causal = false;
  };
  std::map<int64_t, Mask> masks;  ///< by window
};

/// [N, heads, d] → [B, heads, T, d], differentiable.
[[nodiscard]] at::Tensor unpack_heads(const at::Tensor& x_Nhd, const AttentionLayout& layout,
                                      const AttentionTables& tables);
/// [B, heads, T, d] → [N, heads·d], differentiable.
[[nodiscard]] at::Tensor pack_heads(const at::Tensor& x_BhTd, const AttentionLayout& layout,
                                    const AttentionTables& tables);

/// Scores (one a query head, query and key) that attend() makes at once: 256 MiB in float32.
inline constexpr int64_t kScoresAtOnce = int64_t{1} << 26;

/// A call of attention, as far as it decides which way is taken.
struct AttentionCase {
  bool cuda = true;
  at::ScalarType dtype = at::kFloat;
  int64_t repeat = 1;  ///< query heads a key-value head
  int64_t queries = 1;
  int64_t width = 64;     ///< of a head
  bool gradient = false;  ///< wanted of queries or keys
};

/// How a call is served. CUDA's fused kernels know groups of heads only in half precision and without a mask; else
/// LibTorch makes all scores, from keys and values that it repeats and keeps for the gradient. And their gradient for a
/// few masked queries takes longer than the products do where heads are wider than 64: five times as long for the 256
/// of GPT-J, twice for 128 (an H200, 28 queries and 40 keys a row).
enum class AttentionWay {
  kLibrary,   ///< LibTorch's kernel takes them as they are
  kProducts,  ///< few queries: the heads of a group are one product with their keys
  kRepeated,  ///< keys and values are repeated, for a kernel that holds no scores
};
[[nodiscard]] AttentionWay attention_way(const AttentionCase& call, const AttentionTables::Mask& mask);

/// softmax(scale · q·k + mask) · v with groups of query heads sharing a key-value head. Not every kernel avoids keeping
/// all scores: where one would, and no gradient is wanted, queries are taken in runs of at most `scores_at_once`.
[[nodiscard]] at::Tensor attend(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd,
                                const AttentionTables::Mask& mask, double scale, double softcap,
                                int64_t scores_at_once = kScoresAtOnce);

/// The same written out, with what a fused kernel does not show: `at_scores` and `at_pattern` get [B, heads, T, S] and
/// give it back, changed or not; either may be empty.
using AttentionHook = std::function<at::Tensor(at::Tensor)>;
[[nodiscard]] at::Tensor attend_openly(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd,
                                       const AttentionTables::Mask& mask, double scale, double softcap,
                                       const AttentionHook& at_scores, const AttentionHook& at_pattern);

}  // namespace emend::models::detail
