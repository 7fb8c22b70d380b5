// A stretch of text on its way through the tokenizer, and where its bytes come from.
#pragma once

#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace emend::models::detail {

/// A byte range of the original text.
struct Origin {
  uint32_t begin = 0, end = 0;
};

/// A view of (possibly normalised) text. Does not own anything.
struct Piece {
  std::string_view text;
  const Origin* origin = nullptr;  ///< one entry a byte of `text`; null: byte i is byte base + i of the original
  size_t base = 0;

  /// Range of the original that the bytes [begin, end) of this piece stand for; begin < end.
  [[nodiscard]] size_t original_begin(size_t begin) const { return origin ? origin[begin].begin : base + begin; }
  [[nodiscard]] size_t original_end(size_t end) const { return origin ? origin[end - 1].end : base + end; }
  [[nodiscard]] Origin origin_at(size_t byte) const {
    return origin ? origin[byte] : Origin{static_cast<uint32_t>(base + byte), static_cast<uint32_t>(base + byte + 1)};
  }
  [[nodiscard]] Piece part(size_t begin, size_t end) const {
    return {text.substr(begin, end - begin), origin ? origin + begin : nullptr, base + begin};
  }
};

/// Builds changed text together with its origins.
class PieceBuilder {
 public:
  /// Texts of more than `most` bytes are refused: rules that double a text would take all memory.
  explicit PieceBuilder(size_t most = std::string::npos) : most_(most) {}
  void reserve(size_t bytes) {
    text_.reserve(bytes);
    origin_.reserve(bytes);
  }
  /// Appends the bytes [begin, end) of `source` unchanged.
  void keep(const Piece& source, size_t begin, size_t end) {
    text_ += source.text.substr(begin, end - begin);
    for (size_t i = begin; i < end; ++i) origin_.push_back(source.origin_at(i));
  }
  /// Appends `bytes`, all of which stand for the bytes [begin, end) of `source`. With begin == end they stand for
  /// nothing, at that place.
  void put(std::string_view bytes, const Piece& source, size_t begin, size_t end) {
    if (bytes.size() > most_ - std::min(most_, text_.size())) too_long();
    text_ += bytes;
    Origin range;
    if (begin < end) {
      range = {static_cast<uint32_t>(source.original_begin(begin)), static_cast<uint32_t>(source.original_end(end))};
    } else {
      const size_t size = source.text.size();
      const auto place = static_cast<uint32_t>(size == 0 || !source.origin ? source.base + begin
                                               : begin < size              ? source.original_begin(begin)
                                                                           : source.original_end(size));
      range = {place, place};
    }
    origin_.insert(origin_.end(), bytes.size(), range);
  }
  /// A view of what was built; valid until the builder changes.
  [[nodiscard]] Piece piece() const { return {text_, origin_.data(), 0}; }

 private:
  [[noreturn]] void too_long() const;

  size_t most_;
  std::string text_;
  std::vector<Origin> origin_;
};

/// For callbacks that do not outlive the call.
using PieceSink = c10::function_ref<void(const Piece&)>;

}  // namespace emend::models::detail
