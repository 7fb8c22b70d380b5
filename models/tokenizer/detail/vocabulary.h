// Pieces and their ids, both ways.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace emend::models::detail {

inline constexpr uint32_t kNoToken = std::numeric_limits<uint32_t>::max();
/// Larger ids are refused: no model has so many rows, and the table is indexed by id.
inline constexpr int64_t kMaxTokenId = (1 << 24) - 1;

/// A fast hash of short strings; the same on every machine of one byte order.
[[nodiscard]] uint64_t hash_bytes(std::string_view bytes);

class Vocabulary {
 public:
  void reserve(size_t pieces);
  /// Adds a piece. A piece that is there already keeps its first id for find(); an id's first piece is kept.
  /// `id` must be in [0, kMaxTokenId].
  void add(std::string_view piece, uint32_t id);

  /// The id of `piece`, or kNoToken.
  [[nodiscard]] uint32_t find(std::string_view piece) const;
  /// The piece of `id`, or nothing.
  [[nodiscard]] std::optional<std::string_view> piece(uint32_t id) const;
  /// Number of different pieces.
  [[nodiscard]] size_t size() const { return count_; }
  /// Largest id + 1.
  [[nodiscard]] uint32_t id_end() const { return static_cast<uint32_t>(places_.size()); }

 private:
  struct Place {
    uint32_t offset = 0, length = kNoToken;  // length kNoToken: no piece
  };
  [[nodiscard]] std::string_view text(uint32_t id) const {
    return {text_.data() + places_[id].offset, places_[id].length};
  }
  void insert(uint32_t id);
  void grow(size_t slots);

  std::string text_;             // all pieces, one after another
  std::vector<Place> places_;    // by id
  std::vector<uint32_t> slots_;  // open addressing: ids, or kNoToken
  size_t count_ = 0;
};

}  // namespace emend::models::detail
