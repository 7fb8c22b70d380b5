#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/vocabulary.h>

#include <bit>
#include <cstring>
#include <utility>

namespace emend::models::detail {

uint64_t hash_bytes(std::string_view bytes) {
  constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15ULL;
  uint64_t hash = bytes.size() * kMultiplier;
  const auto mix = [&hash](uint64_t word) {
    hash = (hash ^ word) * kMultiplier;
    hash ^= hash >> 32;
  };
  const char* at = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    mix(word);
  }
  uint64_t word = 0;
  if (left > 0) std::memcpy(&word, at, left);
  mix(word);
  return hash ^ hash >> 29;
}

void Vocabulary::reserve(size_t pieces) {
  places_.reserve(pieces);
  text_.reserve(pieces * 8);
  grow(std::bit_ceil(pieces * 2 + 16));
}

void Vocabulary::add(std::string_view piece, uint32_t id) {
  EMEND_CHECK(id <= kMaxTokenId && text_.size() + piece.size() < kNoToken, "token id or vocabulary too large");
  if (id >= places_.size()) places_.resize(id + 1);
  if (places_[id].length != kNoToken) return;
  places_[id] = {static_cast<uint32_t>(text_.size()), static_cast<uint32_t>(piece.size())};
  text_ += piece;
  if (find(piece) != kNoToken) return;
  if ((count_ + 1) * 2 > slots_.size()) grow(std::bit_ceil((count_ + 8) * 4));
  insert(id);
  ++count_;
}

void Vocabulary::insert(uint32_t id) {
  const size_t mask = slots_.size() - 1;
  size_t slot = hash_bytes(text(id)) & mask;
  while (slots_[slot] != kNoToken) slot = (slot + 1) & mask;
  slots_[slot] = id;
}

void Vocabulary::grow(size_t slots) {
  if (slots <= slots_.size()) return;
  const std::vector<uint32_t> old = std::exchange(slots_, std::vector<uint32_t>(slots, kNoToken));
  for (const uint32_t id : old)
    if (id != kNoToken) insert(id);
}

uint32_t Vocabulary::find(std::string_view piece) const {
  if (slots_.empty()) return kNoToken;
  const size_t mask = slots_.size() - 1;
  for (size_t slot = hash_bytes(piece) & mask; slots_[slot] != kNoToken; slot = (slot + 1) & mask)
    if (text(slots_[slot]) == piece) return slots_[slot];
  return kNoToken;
}

std::optional<std::string_view> Vocabulary::piece(uint32_t id) const {
  if (id >= places_.size() || places_[id].length == kNoToken) return std::nullopt;
  return text(id);
}

}  // namespace emend::models::detail
