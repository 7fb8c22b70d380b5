// Subjects that texts often speak of: what follows a passing mention of one (methods/latch.cpp).
#pragma once

#include <emend/editors/detail/latch_batch.h>
#include <emend/editors/steps/targets.h>

#include <map>
#include <span>
#include <string>
#include <vector>

namespace emend::editors::detail {

/// Of each subject −log p of its name (of 16 tokens at most) behind a few beginnings of sentences, the mean of p.
/// Throws Error(kCancelled).
[[nodiscard]] std::vector<double> surprise_of_names(const models::Model& model, std::span<const std::string> subjects,
                                                    const CancelToken& cancel);

/// By subject, for those of a surprise below 18: rows that mention it in passing, with pieces of the text behind them,
/// whose tokens count as far as they are less probable than `reader` finds them now. The weights of a subject's rows
/// sum to 1. None where no piece is long enough, and where facts are looked up at the end of the prompt. Throws
/// Error(kCancelled).
[[nodiscard]] std::map<std::string, std::vector<TargetRow>> passing_mentions(const LatchHparams& hparams,
                                                                             std::span<const std::string> subjects,
                                                                             const LatchTexts& texts,
                                                                             const models::Model& reader,
                                                                             const EditContext& context);

}  // namespace emend::editors::detail
