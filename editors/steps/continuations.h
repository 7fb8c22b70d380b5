// What a model writes behind an answer, and targets under which that does not become less probable.
#pragma once

#include <emend/core/cancel.h>
#include <emend/editors/steps/prompts.h>
#include <emend/editors/steps/targets.h>
#include <emend/models/model.h>

#include <functional>

namespace emend::editors {

constexpr double kLikely = 0.5;  ///< −log p of a token that is by far the likeliest

struct Continuation {
  std::vector<int64_t> ids;
  std::vector<double> nll;  ///< −log p of each, and of the token that ended the text
};

/// A prompt with the answer behind it, looked up at the answer's last token.
[[nodiscard]] PromptRow answered(const PromptRow& prompt, const std::vector<int64_t>& answer);

/// Whether the token goes on with the last word of the answer: "Pelé" is not to be the beginning of "Peléo", nor
/// "Japan" of "Japanese", nor "1947" of "1947-01-01". Of scripts that write words apart from one another.
[[nodiscard]] bool lengthens(const models::Tokenizer& tokenizer, const std::vector<int64_t>& answer, int64_t id);

/// Whether the greedy text behind each prompt begins with its answer. Throws Error(kCancelled).
[[nodiscard]] std::vector<bool> says(const models::Model& model, const std::vector<PromptRow>& prompts,
                                     const std::vector<std::vector<int64_t>>& answers, const CancelToken& cancel);

/// Greedy texts of at most `tokens` behind each of these rows, up to the end of the text. Where `may_begin` (of a row
/// and a token) is given and denies the first token, the likeliest one that it allows among the first few takes its
/// place, and is to become likely: its −log p is told as kLikely at most. Throws Error(kCancelled).
[[nodiscard]] std::vector<Continuation> continue_greedily(
    const models::Model& model, const std::vector<std::vector<int64_t>>& prompts, int64_t tokens,
    const CancelToken& cancel, const std::function<bool(size_t row, int64_t id)>& may_begin = {});

/// A row behind the answer, looked up at its last token: what was written there counts as far as it is less probable
/// than it was. Its weight is 0; nothing if nothing was written.
[[nodiscard]] std::optional<TargetRow> going_on(const PromptRow& prompt, const std::vector<int64_t>& answer,
                                                const Continuation& continued);

}  // namespace emend::editors
