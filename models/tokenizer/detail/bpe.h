// Byte pair encoding: words to tokens by a ranked list of merges.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace emend::models::detail {

// Pieces and their ids, both ways.

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

// A bounded cache of tokenised words that any number of threads share without waiting.

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

/// Two adjacent tokens become one. Lower ranks go first; merges of one rank go from left to right.
struct Merge {
  uint32_t left = 0, right = 0, result = 0, rank = 0;
};

/// Merges by pair of ids: open addressing, two cache lines at most in the usual case.
class MergeTable {
 public:
  explicit MergeTable(const std::vector<Merge>& merges);
  [[nodiscard]] const Merge* find(uint32_t left, uint32_t right) const;
  /// All merges, best first.
  [[nodiscard]] std::vector<Merge> sorted() const;

 private:
  std::vector<Merge> slots_;  // result kNoToken: empty
};

struct BpeOptions {
  bool byte_level = false;     ///< words are raw bytes; the vocabulary is written in byte-level characters
  bool byte_fallback = false;  ///< a character without a piece becomes the pieces <0xNN> of its bytes
  bool fuse_unk = false;       ///< neighbouring unknown characters become one unknown token
  bool ignore_merges = false;  ///< a word that is a piece becomes that piece, whatever the merges say
  uint32_t unk = kNoToken;     ///< the unknown token; without one, unknown characters are dropped
};

/// Immutable and thread-safe; the cache inside is synchronised.
class Bpe {
 public:
  Bpe(Vocabulary vocabulary, const std::vector<Merge>& merges, BpeOptions options);

  /// Appends the tokens of `word` (valid UTF-8, or any bytes if byte_level) to `out`, with positions in `word`.
  void tokenise(std::string_view word, std::vector<WordToken>& out) const;

  [[nodiscard]] const Vocabulary& vocabulary() const { return vocabulary_; }
  [[nodiscard]] const MergeTable& merges() const { return merges_; }
  [[nodiscard]] const BpeOptions& options() const { return options_; }
  /// True if text can be cut before every ▁ that follows another character without changing any id: no merge joins
  /// across such a place. Long texts then profit from the cache of words.
  [[nodiscard]] bool splits_at_metaspace() const { return splits_at_metaspace_; }

 private:
  struct Symbol {
    uint32_t id, begin, end;
    const Merge* merge;  // with the symbol to the right
  };

  void tokenise_uncached(std::string_view word, std::vector<WordToken>& out) const;
  void initial_bytes(std::string_view word, std::vector<Symbol>& symbols) const;
  void initial_characters(std::string_view word, std::vector<Symbol>& symbols) const;
  void add_unknown(uint32_t begin, uint32_t end, bool& fusing, std::vector<Symbol>& symbols) const;
  void merge_short(std::vector<Symbol>& symbols) const;
  void merge_long(std::vector<Symbol>& symbols) const;
  [[nodiscard]] bool check_metaspace() const;

  Vocabulary vocabulary_;
  MergeTable merges_;
  BpeOptions options_;
  std::array<uint32_t, 256> byte_ids_{};   // byte_level: the piece of one byte; byte_fallback: <0xNN>
  std::array<uint32_t, 128> ascii_ids_{};  // pieces of one ASCII character
  bool has_byte_pieces_ = false;
  bool splits_at_metaspace_ = false;
  WordCache cache_;
};

/// Every way to build a piece from two others, ranked by `ranks` (by id; kNoToken leaves a piece out). This is how
/// vocabularies without a list of merges work: tiktoken (rank = id) and SentencePiece (rank by score).
[[nodiscard]] std::vector<Merge> merges_from_ranks(const Vocabulary& vocabulary, const std::vector<uint32_t>& ranks);

}  // namespace emend::models::detail
