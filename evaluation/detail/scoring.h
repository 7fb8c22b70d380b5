// Shared by the scorers.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/evaluation/scoring.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace emend::evaluation {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Score, labels, predicted, log_probs)

namespace detail {

/// Ids with what the tokenizer puts in front of a text, without what it puts behind.
[[nodiscard]] std::vector<int64_t> encode_text(const models::Tokenizer& tokenizer, std::string_view text);
/// encode_request for each, every prompt and every request encoded once.
[[nodiscard]] std::vector<EncodedRequest> encode_requests(const models::Tokenizer& tokenizer,
                                                          const std::vector<ScoreRequest>& requests);
/// The request for messages, shortened.
[[nodiscard]] std::string quoted(const ScoreRequest& request);
/// float32 or wider.
[[nodiscard]] at::Tensor wide_logits(const at::Tensor& logits);
[[noreturn]] void not_finite(const std::string& where);
/// score_requests where `options.sharing` has several processes.
[[nodiscard]] std::vector<Score> share_scores(const models::Model& model, const std::vector<ScoreRequest>& requests,
                                              const ScoreOptions& options);

}  // namespace detail
}  // namespace emend::evaluation
