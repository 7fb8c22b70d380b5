// What a model writes behind an answer, and targets under which that does not become less probable.
#pragma once

#include <emend/core/cancel.h>
#include <emend/editors/steps/prompts.h>
#include <emend/editors/steps/targets.h>
#include <emend/models/model.h>

namespace emend::editors {

struct Continuation {
  std::vector<int64_t> ids;
  std::vector<double> nll;  ///< −log p of each, and of the token that ended the text
};

/// A prompt with the answer behind it, looked up at the answer's last token.
[[nodiscard]] PromptRow answered(const PromptRow& prompt, const std::vector<int64_t>& answer);

/// Greedy texts of at most `tokens` behind each of these rows, up to the end of the text. Throws Error(kCancelled).
[[nodiscard]] std::vector<Continuation> continue_greedily(const models::Model& model,
                                                          const std::vector<std::vector<int64_t>>& prompts,
                                                          int64_t tokens, const CancelToken& cancel);

/// A row behind the answer, looked up at its last token: what was written there counts as far as it is less probable
/// than it was. Its weight is 0; nothing if nothing was written.
[[nodiscard]] std::optional<TargetRow> going_on(const PromptRow& prompt, const std::vector<int64_t>& answer,
                                                const Continuation& continued);

}  // namespace emend::editors
