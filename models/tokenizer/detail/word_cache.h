// A bounded cache of tokenised words that any number of threads share without waiting.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

namespace emend::models::detail {

/// One token of a word: its id and the bytes [begin, end) of the word that it stands for.
struct WordToken {
  uint32_t id = 0;
  uint32_t begin = 0, end = 0;
};

/// Fixed number of slots of one cache line; a new word replaces the one in its slot. A slot that another thread is
/// using at this moment counts as a miss, so nobody ever waits.
class WordCache {
 public:
  static constexpr size_t kSlots = size_t{1} << 15;  // 2 MiB
  static constexpr size_t kMaxKey = 31, kMaxTokens = 6;

  /// Appends the tokens of `word` to `out` and returns true if they are known. `hash` must depend on `word` alone.
  [[nodiscard]] bool find(std::string_view word, uint64_t hash, std::vector<WordToken>& out) const {
    if (word.size() > kMaxKey) return false;
    Slot& slot = slots_[hash & (kSlots - 1)];
    if (slot.busy.test_and_set(std::memory_order_acquire)) return false;
    const bool hit = slot.size == word.size() && std::memcmp(slot.key, word.data(), word.size()) == 0;
    if (hit) {
      uint32_t at = 0;
      for (uint8_t i = 0; i < slot.count; ++i) {
        out.push_back({slot.ids[i], at, at + slot.lengths[i]});
        at += slot.lengths[i];
      }
    }
    slot.busy.clear(std::memory_order_release);
    return hit;
  }

  /// Remembers `tokens`, which must cover `word` without gaps to be kept.
  void store(std::string_view word, uint64_t hash, const WordToken* tokens, size_t count) const {
    if (word.empty() || word.size() > kMaxKey || count > kMaxTokens) return;
    uint32_t at = 0;
    for (size_t i = 0; i < count; at = tokens[i++].end)
      if (tokens[i].begin != at) return;
    if (at != word.size()) return;
    Slot& slot = slots_[hash & (kSlots - 1)];
    if (slot.busy.test_and_set(std::memory_order_acquire)) return;
    slot.size = static_cast<uint8_t>(word.size());
    slot.count = static_cast<uint8_t>(count);
    std::memcpy(slot.key, word.data(), word.size());
    for (size_t i = 0; i < count; ++i) {
      slot.ids[i] = tokens[i].id;
      slot.lengths[i] = static_cast<uint8_t>(tokens[i].end - tokens[i].begin);
    }
    slot.busy.clear(std::memory_order_release);
  }

 private:
  struct alignas(64) Slot {
    uint32_t ids[kMaxTokens];
    std::atomic_flag busy;
    uint8_t size = 0;  // 0: empty
    uint8_t count = 0;
    uint8_t lengths[kMaxTokens];
    char key[kMaxKey];
  };
  static_assert(sizeof(Slot) == 64);

  std::unique_ptr<Slot[]> slots_ = std::make_unique<Slot[]>(kSlots);
};

}  // namespace emend::models::detail
