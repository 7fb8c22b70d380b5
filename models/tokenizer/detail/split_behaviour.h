// What happens to the delimiters when text is split: the "behavior" values of tokenizer files.
#pragma once

#include <emend/models/tokenizer/detail/json_view.h>
#include <emend/models/tokenizer/detail/piece.h>

namespace emend::models::detail {

/// On "the-final--countdown" with "-":
enum class SplitBehaviour {
  kRemoved,             ///< the, final, countdown
  kIsolated,            ///< the, -, final, -, -, countdown
  kMergedWithPrevious,  ///< the-, final-, -, countdown
  kMergedWithNext,      ///< the, -final, -, -countdown
  kContiguous,          ///< the, -, final, --, countdown
};

[[nodiscard]] SplitBehaviour parse_behaviour(const JsonView& view);

/// Takes consecutive stretches of one piece, each a delimiter or not, and hands out the words.
class Splitter {
 public:
  Splitter(const Piece& source, SplitBehaviour behaviour, PieceSink sink)
      : source_(source), behaviour_(behaviour), sink_(sink) {}
  void add(size_t begin, size_t end, bool delimiter);
  /// Hands out what is still held back. Call once, at the end.
  void finish();

 private:
  void flush();

  const Piece& source_;
  SplitBehaviour behaviour_;
  PieceSink sink_;
  bool holding_ = false;        // a word [begin_, end_) that the next stretch may extend
  bool was_delimiter_ = false;  // the last stretch
  size_t begin_ = 0, end_ = 0;
};

}  // namespace emend::models::detail
