// Rows of tokens, packed.
//
// The executor computes on [N, width] tensors that hold the real tokens of all rows one after the other: padding does
// not exist, so it costs nothing. Only attention unpacks, per layer, into [rows, heads, longest, head size].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace emend::models {

struct ModelConfig;

class TokenBatch {
 public:
  TokenBatch() = default;

  /// One row per vector; positions 0,1,2,… Rows may have different lengths but not length 0.
  [[nodiscard]] static TokenBatch from_rows(const std::vector<std::vector<int64_t>>& rows);

  /// Rows that continue a cache: row r's first token has position `begins[r]`, and column `columns[r]` where that is
  /// another (behind padding on the left).
  [[nodiscard]] static TokenBatch continuing(const std::vector<std::vector<int64_t>>& rows,
                                             const std::vector<int64_t>& begins,
                                             const std::vector<int64_t>& columns = {});

  /// From [B,T] ids and mask (CPU, int64 or bool) as Hugging Face models take them. Without position ids, positions are
  /// columns (families that derive them from the mask do so). `keep_padding` computes padded positions too, as the
  /// published implementations do: they are packed like other tokens and never attended to.
  [[nodiscard]] static TokenBatch from_padded(const at::Tensor& input_ids, const at::Tensor& attention_mask,
                                              const at::Tensor& position_ids = {}, bool keep_padding = false);

  /// The same of rows that are filled up on the right with `pad`, with keep_padding.
  [[nodiscard]] static TokenBatch padded(const std::vector<std::vector<int64_t>>& rows, int64_t pad = 0);

  [[nodiscard]] int64_t rows() const noexcept { return std::ssize(row_begin_) - 1; }
  [[nodiscard]] int64_t tokens() const noexcept { return std::ssize(ids_); }
  [[nodiscard]] int64_t length(int64_t row) const { return row_begin_[row + 1] - row_begin_[row]; }
  [[nodiscard]] int64_t longest() const;  ///< length of the longest row
  /// Packed index of the k-th token of a row; negative k counts from the row's end.
  [[nodiscard]] int64_t token(int64_t row, int64_t k) const;
  [[nodiscard]] std::vector<int64_t> last_tokens() const;  ///< token(row, -1) of every row

  [[nodiscard]] const std::vector<int64_t>& ids() const noexcept { return ids_; }
  [[nodiscard]] const std::vector<int64_t>& positions() const noexcept { return positions_; }
  [[nodiscard]] const std::vector<int64_t>& columns() const noexcept { return columns_; }
  [[nodiscard]] const std::vector<int64_t>& row_begin() const noexcept { return row_begin_; }
  /// True for tokens that exist only as padding (keep_padding).
  [[nodiscard]] const std::vector<bool>& is_padding() const noexcept { return is_padding_; }
  /// True if positions were given explicitly (position ids or a continuation), false if they are the default.
  [[nodiscard]] bool explicit_positions() const noexcept { return explicit_positions_; }
  /// Says that row r is a part of a prompt of `lengths[r]` tokens (a chunk of it): rotary forms that depend on the
  /// prompt's length then see the whole of it. Empty (the default): each row is complete.
  void set_full_lengths(std::vector<int64_t> lengths);
  [[nodiscard]] const std::vector<int64_t>& full_lengths() const noexcept { return full_lengths_; }

  /// [N, …] packed → [B, T, …] with zeros at padding; T is the width the batch was padded to, or the longest row.
  [[nodiscard]] at::Tensor unpack(const at::Tensor& packed) const;
  /// The inverse: [B, T, …] → [N, …] packed.
  [[nodiscard]] at::Tensor pack(const at::Tensor& unpacked) const;

 private:
  std::vector<int64_t> ids_, positions_, columns_, row_begin_{0};
  std::vector<bool> is_padding_;
  std::vector<int64_t> slots_;  // in [B, T] flattened, for unpack
  std::vector<int64_t> full_lengths_;
  int64_t width_ = 0;
  bool explicit_positions_ = false;
};

/// Rows that begin alike, whose common beginning is worth computing once.
struct SharedGroup {
  int64_t shared = 0;        ///< tokens that all rows of the group begin with; 0: computed on their own
  std::vector<size_t> rows;  ///< indices into the sequences
};

/// The partition that saves most tokens with one level of sharing. `least` is the smallest saving that is worth a pass
/// of its own; `sequences` are what may be shared of each row (not its last token). Order: by content.
[[nodiscard]] std::vector<SharedGroup> share_beginnings(const std::vector<std::vector<int64_t>>& sequences,
                                                        int64_t least);

/// How many tokens all rows begin with that are worth a pass of their own, whose keys and values then serve every row
/// (KvCache::select_rows). Of each row `left` tokens or more are kept apart. 0 for few of them, and where rotary
/// frequencies depend on how long the whole row is.
[[nodiscard]] int64_t shared_beginning(const ModelConfig& config, const std::vector<std::vector<int64_t>>& rows,
                                       int64_t left = 1);

}  // namespace emend::models
