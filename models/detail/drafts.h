// What a row's drafts say comes next, and how much of it is worth checking in one pass.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace emend::models::detail {

/// What is known of a row's drafts.
struct Record {
  int64_t trust = 4;  ///< right tokens that count as written before those of a draft that agrees from its first one on
  int64_t wrong = 0;  ///< guesses that were not
};

/// The tokens that would follow if one of the drafts were right.
struct Guess {
  std::vector<int64_t> tokens;
  double chance = 0;  ///< that a token is right where those before it are: a guess from how far draft and text agree
};

/// Goes on from the place in the drafts whose tokens before it agree with the end of `written` over the longest
/// stretch; at least one token must agree unless nothing is written yet. At the same stretch a draft that agrees from
/// its first token on is preferred, then the earlier one in the list. At most `most` tokens; none: no such place.
[[nodiscard]] Guess guess_next(const std::vector<std::vector<int64_t>>& drafts, std::span<const int64_t> written,
                               int64_t most, const Record& record = {});

/// How many of each row's guessed tokens a pass should check beside the one that each row needs anyway: those for
/// which expected tokens over time is largest. The i-th guessed token of a row is right with chanceⁱ; time is a table
/// of pass time over tokens, measured once (docs/performance.md), so that the choice is the same in every run.
///   anyway   tokens that the pass has without them: one a row, or all of the prompts
///   limit    largest number of tokens whose logits the pass gives, one a row and those checked
///   on_host  whether the products are a CPU's; on a GPU passes of a few hundred tokens take about as long as of one
[[nodiscard]] std::vector<int64_t> worth_checking(const std::vector<Guess>& guesses, int64_t anyway, int64_t limit,
                                                  bool on_host);

}  // namespace emend::models::detail
