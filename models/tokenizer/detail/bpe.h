// Byte pair encoding: words to tokens by a ranked list of merges.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace emend::models::detail {

// Pieces and their ids, both ways.

inline constexpr uint32_t kNoToken = std::numeric_limits<uint32_t>::max();
/// Larger ids are refused: no model has so many rows, and the table is indexed by id.
inline constexpr int64_t kMaxTokenId = (1 << 24) - 1;

class Vocabulary {
 public:
  Vocabulary() = default;
  Vocabulary(Vocabulary&&) = default;  // copies would point into the original
  Vocabulary& operator=(Vocabulary&&) = default;

  void reserve(size_t pieces);
  /// Adds a piece. A piece that is there already keeps its first id for find(); an id's first piece is kept.
  /// `id` must be in [0, kMaxTokenId].
  void add(std::string_view piece, uint32_t id);

  /// The id of `piece`, or kNoToken.
  [[nodiscard]] uint32_t find(std::string_view piece) const;
  /// The piece of `id`, or nothing.
  [[nodiscard]] std::optional<std::string_view> piece(uint32_t id) const;
  /// Number of different pieces.
  [[nodiscard]] size_t size() const { return ids_.size(); }
  /// Largest id + 1.
  [[nodiscard]] uint32_t id_end() const { return static_cast<uint32_t>(pieces_.size()); }

 private:
  struct Hash {
    using is_transparent = void;
    // Without noexcept: only then libstdc++ keeps the hashes, and comparing is fast.
    size_t operator()(std::string_view piece) const { return std::hash<std::string_view>()(piece); }
  };
  std::unordered_map<std::string, uint32_t, Hash, std::equal_to<>> ids_;
  std::vector<const std::string*> pieces_;  // by id: keys of ids_, or null
};

// A bounded cache of tokenised words that any number of threads share without waiting.

/// One token of a word: its id and the bytes [begin, end) of the word that it stands for.
struct WordToken {
  uint32_t id = 0;
  uint32_t begin = 0, end = 0;
};

/// Fixed number of slots; a new word replaces the one in its slot. A slot that another thread is using at this moment
/// counts as a miss, so nobody ever waits.
class WordCache {
 public:
  static constexpr size_t kSlots = size_t{1} << 15;
  static constexpr size_t kMaxKey = 31;  ///< longer words are not kept

  /// Appends the tokens of `word` to `out` and returns true if they are known.
  [[nodiscard]] bool find(std::string_view word, std::vector<WordToken>& out) const {
    bool hit = false;
    use_slot(word, [&](const Slot& slot) {
      hit = slot.word == word;
      if (hit) out.insert(out.end(), slot.tokens.begin(), slot.tokens.end());
    });
    return hit;
  }
  /// Remembers the tokens of `word`.
  void store(std::string_view word, std::span<const WordToken> tokens) const {
    use_slot(word, [&](Slot& slot) {
      slot.word = word;
      slot.tokens.assign(tokens.begin(), tokens.end());
    });
  }

 private:
  struct alignas(64) Slot {
    std::atomic_flag busy;
    std::string word;  // empty: none
    std::vector<WordToken> tokens;
  };

  template <class Use>
  void use_slot(std::string_view word, const Use& use) const {
    if (word.empty() || word.size() > kMaxKey) return;
    Slot& slot = slots_[std::hash<std::string_view>()(word) % kSlots];
    if (slot.busy.test_and_set(std::memory_order_acquire)) return;
    use(slot);
    slot.busy.clear(std::memory_order_release);
  }

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
  /// `vocabulary` must outlive it.
  Bpe(const Vocabulary& vocabulary, const std::vector<Merge>& merges, BpeOptions options);

  /// Appends the tokens of `word` (valid UTF-8, or any bytes if byte_level) to `out`, with positions in `word`.
  void tokenise(std::string_view word, std::vector<WordToken>& out) const;

  /// True if text can be cut before every ▁ that follows another character without changing any id: no merge joins
  /// across such a place. Long texts then profit from the cache of words.
  [[nodiscard]] bool splits_at_metaspace() const { return splits_at_metaspace_; }

 private:
  struct Symbol {
    uint32_t id, begin, end;
    const Merge* merge;  // with the symbol to the right
  };

  void tokenise_uncached(std::string_view word, std::vector<WordToken>& out) const;
  void initial_symbols(std::string_view word, std::vector<Symbol>& symbols) const;
  void merge_short(std::vector<Symbol>& symbols) const;
  void merge_long(std::vector<Symbol>& symbols) const;

  const Vocabulary& vocabulary_;
  MergeTable merges_;
  BpeOptions options_;
  std::array<uint32_t, 256> single_ids_{};  // pieces of one byte: any if byte_level, else ASCII
  std::array<uint32_t, 256> byte_ids_{};    // byte_fallback: <0xNN>
  bool splits_at_metaspace_ = false;
  WordCache cache_;
};

/// Every way to build a piece from two others, ranked by `ranks` (by id; kNoToken leaves a piece out). This is how
/// vocabularies without a list of merges work: tiktoken (rank = id) and SentencePiece (rank by score).
[[nodiscard]] std::vector<Merge> merges_from_ranks(const Vocabulary& vocabulary, const std::vector<uint32_t>& ranks);

}  // namespace emend::models::detail
