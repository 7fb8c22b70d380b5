#include <emend/models/tokenizer/detail/split_behaviour.h>

namespace emend::models::detail {

SplitBehaviour parse_behaviour(const JsonView& view) {
  const std::string& name = view.string();
  if (name == "Removed" || name == "removed") return SplitBehaviour::kRemoved;
  if (name == "Isolated" || name == "isolated") return SplitBehaviour::kIsolated;
  if (name == "MergedWithPrevious" || name == "merged_with_previous") return SplitBehaviour::kMergedWithPrevious;
  if (name == "MergedWithNext" || name == "merged_with_next") return SplitBehaviour::kMergedWithNext;
  if (name == "Contiguous" || name == "contiguous") return SplitBehaviour::kContiguous;
  view.fail("Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

void Splitter::flush() {
  if (holding_) sink_(source_.part(begin_, end_));
  holding_ = false;
}

void Splitter::add(size_t begin, size_t end, bool delimiter) {
  bool extends = false;
  switch (behaviour_) {
    case SplitBehaviour::kRemoved:
      if (!delimiter) sink_(source_.part(begin, end));
      return;
    case SplitBehaviour::kIsolated:
      return sink_(source_.part(begin, end));
    case SplitBehaviour::kContiguous:
      extends = holding_ && delimiter == was_delimiter_;
      break;
    // A delimiter joins the stretch before it unless that is a delimiter too.
    case SplitBehaviour::kMergedWithPrevious:
      extends = holding_ && delimiter && !was_delimiter_;
      break;
    // A stretch joins the delimiter before it; of several delimiters, only the last finds one to join.
    case SplitBehaviour::kMergedWithNext:
      extends = holding_ && !delimiter && was_delimiter_;
      break;
  }
  if (extends) {
    end_ = end;
  } else {
    flush();
    holding_ = true;
    begin_ = begin;
    end_ = end;
  }
  was_delimiter_ = delimiter;
}

void Splitter::finish() {
  flush();
}

}  // namespace emend::models::detail
