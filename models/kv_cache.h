// Keys and values of earlier tokens: one pair of tensors a layer, on that layer's device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace emend::models {

/// Row r of layer l holds `length(r)` tokens in slots 0 … length(r)-1 of keys(l)[r], whatever the padding of the batch
/// was. Created empty; each layer allocates from its own first keys, so nothing is ever on a wrong device.
class KvCache {
 public:
  /// `capacity` tokens a row are reserved at the first append (it grows by a quarter when exceeded).
  explicit KvCache(int n_layers, int64_t capacity = 0);
  KvCache(KvCache&&) = default;  // a copy would share keys and values: select_rows
  KvCache& operator=(KvCache&&) = default;

  [[nodiscard]] int64_t length(int64_t row) const { return lengths_.at(row); }
  [[nodiscard]] const std::vector<int64_t>& lengths() const noexcept { return lengths_; }
  [[nodiscard]] bool empty() const noexcept { return lengths_.empty(); }
  /// [B, kv heads, slots, head size]; undefined for a layer that has not run.
  [[nodiscard]] const at::Tensor& keys(int layer) const { return keys_.at(layer); }
  [[nodiscard]] const at::Tensor& values(int layer) const { return values_.at(layer); }
  /// True if `layer` ran in every pass that appended, so that its keys cover all cached tokens.
  [[nodiscard]] bool complete(int layer) const { return !incomplete_.at(layer); }

  /// Keeps these rows, in this order (rows may repeat).
  [[nodiscard]] KvCache select_rows(const std::vector<int64_t>& rows) const;
  /// Adds the rows of another cache of the same model and dtype behind these. Either may be empty. Throws
  /// Error(kInvalidArgument) if a layer is in one alone.
  void append_rows(KvCache other);
  /// Forgets the tokens after the first `lengths[r]` of each row.
  void truncate(const std::vector<int64_t>& lengths);
  /// Drops the layers below `first` (they will not be read again: a pass that needs them throws).
  void drop_layers_below(int first);
  [[nodiscard]] int64_t bytes() const;

 private:
  friend class DecoderPass;
  void reserve(int layer, const at::Tensor& like_BgTd, int64_t slots);
  [[nodiscard]] int64_t slots_for(const KvCache& other) const;
  std::vector<at::Tensor> keys_, values_;
  std::vector<bool> incomplete_;
  std::vector<int64_t> prompt_lengths_;  // what length-dependent rotary forms were fixed by, a row
  std::vector<int64_t> lengths_;
  int64_t capacity_;
  int n_layers_;
};

}  // namespace emend::models
