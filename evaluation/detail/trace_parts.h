// Shared by the computation of causal traces and the naive one that tests compare with.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/evaluation/tracing.h>
#include <emend/hooks/site.h>

#include <vector>

namespace emend::evaluation::detail {

/// The prompt's tokens and the subject's among them.
struct TraceTokens {
  std::vector<int64_t> ids;
  int64_t subject_begin = 0, subject_end = 0;
};
/// Throws Error(kInvalidArgument) if the prompt has no {} for the subject or this has no token.
[[nodiscard]] TraceTokens trace_tokens(const models::Tokenizer& tokenizer, const datasets::Fact& fact);

/// The site whose output is restored.
[[nodiscard]] hooks::Site trace_site(TraceKind kind);
/// Layers that are restored together: [first, second).
[[nodiscard]] std::pair<int, int> trace_layers(TraceKind kind, int layer, int window, int n_layers);

/// Noise for the subject's tokens, [S, tokens, D]; the same for every call with the same options and sizes.
[[nodiscard]] at::Tensor trace_noise(const TraceOptions& options, int64_t tokens, int64_t width);

/// Probabilities of `answer` from rows of logits. Throws Error(kNumeric) if one is not finite.
[[nodiscard]] std::vector<double> answer_probabilities(const at::Tensor& logits_MV, int64_t answer);

}  // namespace emend::evaluation::detail
