// Byte pair encoding: words to tokens by a ranked list of merges.
#pragma once

#include <emend/models/tokenizer/detail/vocabulary.h>
#include <emend/models/tokenizer/detail/word_cache.h>

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace emend::models::detail {

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
