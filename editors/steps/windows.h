// Long targets cut into windows, each of which is written like a fact of its own (AnyEdit, Jiang et al., ICML 2025).
//
//   prompt  y0 y1 y2 | y3 y4 y5 | y6 y7        window 0 is looked up where facts are (the subject); window w at the
//        ^subject  ^lookup 1  ^lookup 2        token before it, with everything before it standing in the prompt
//
// The windows of a target are optimised one after the other; δ of the earlier ones stays added while a later one moves.
#pragma once

#include <emend/editors/steps/prompts.h>
#include <emend/editors/steps/targets.h>

#include <utility>
#include <vector>

namespace emend::editors {

struct TargetWindows {
  int64_t size = 0;     ///< tokens a window; 0: targets stay whole
  int64_t overlap = 0;  ///< tokens that a window shares with the one before; below `size`
};

/// The windows [begin, end) of a target of so many tokens, in order; they cover it, and only the last may be shorter.
[[nodiscard]] std::vector<std::pair<int64_t, int64_t>> cut_target(int64_t tokens, const TargetWindows& windows);

/// One window of a fact as a fact. The first keeps rows, lookup and KL rows; a later one has the target's tokens before
/// it behind every row, is looked up at the last of them, and has no KL rows: what the subject means is the first
/// window's concern.
[[nodiscard]] RenderedFact window_of(const RenderedFact& fact, std::pair<int64_t, int64_t> window);

/// Keeps the δ of an earlier window added in all rewriting rows of a later one's problem (same rows, same order).
void hold(TargetProblem& problem, const RenderedFact& earlier, const Target& target);

/// What a fact's outcome says of its windows: the first one's δ, the sum of the steps, all curves one after the other
/// and the worst status.
[[nodiscard]] Target summarise(const std::vector<const Target*>& windows);

}  // namespace emend::editors
