// How probable a model finds given continuations of given prompts: the one engine under all probability metrics.
//
// The text of a request is prompt + " " + target, encoded as a whole. The target's tokens are those from p on, where p
// is the number of tokens of the prompt encoded alone (with a beginning-of-sequence token on both sides where the
// tokenizer adds one). Where a merge crosses the border, so that the whole text's first p tokens are not the prompt's,
// the scored span starts at the first token that differs: every token that holds a character of the target is then
// scored.
//
// Goals: all requests of all cases go through the model together. Equal texts and shared beginnings are computed once,
// only the rows that are read are projected to the vocabulary, padding does not exist. Non-goals: sampling
// (models/generation.h), gradients.
#pragma once

#include <emend/core/cancel.h>
#include <emend/core/log.h>
#include <emend/devices/work_sharing.h>
#include <emend/models/model.h>

#include <cstdint>
#include <string>
#include <vector>

namespace emend::models {
class Tokenizer;
}

namespace emend::evaluation {

struct ScoreRequest {
  std::string prompt;
  std::string target;  ///< without leading space; one is put between prompt and target
  auto operator<=>(const ScoreRequest&) const = default;
};

/// Ids of the whole text; the target's tokens are ids[begin …].
struct EncodedRequest {
  std::vector<int64_t> ids;
  int64_t begin = 0;
};

/// Throws Error(kInvalidArgument) if the text has no token that can be predicted (a target that encodes to nothing, or
/// a single token without a beginning-of-sequence token before it).
[[nodiscard]] EncodedRequest encode_request(const models::Tokenizer& tokenizer, const ScoreRequest& request);

/// What the model says about the target of one request; all vectors have one entry a target token.
struct Score {
  std::vector<int64_t> labels;     ///< the target's ids
  std::vector<int64_t> predicted;  ///< argmax at each position under teacher forcing; the lowest id wins a tie
  std::vector<double> log_probs;   ///< natural log-probability of each label (log-softmax in float32 or wider)

  [[nodiscard]] double mean_nll() const;        ///< mean over the target's tokens of -log p
  [[nodiscard]] double total_log_prob() const;  ///< sum of log p
  [[nodiscard]] double token_accuracy() const;  ///< fraction of positions where predicted == label
  [[nodiscard]] bool all_correct() const;       ///< predicted == labels
};

struct ScoreOptions {
  int64_t batch_tokens = 2048;  ///< tokens a forward pass takes at most (one row may be longer)
  int64_t project_rows = 256;   ///< rows projected to the vocabulary at once; bounds the memory for logits
  ProgressFn progress = {};     ///< phase "evaluate", in requests
  std::string phase = "evaluate";
  CancelToken cancel = {};
  devices::WorkSharing sharing = {};  ///< score_requests: processes with the same model and requests that share them
};

/// Scores every request; results are in the order of the requests, in every process that shares them. Runs without
/// gradients; the model is not changed, and hooks that are attached to it act. Throws Error(kInvalidArgument) for
/// requests that cannot be encoded or are longer than the model's positions, Error(kNumeric) if a logit is not finite,
/// Error(kCancelled).
[[nodiscard]] std::vector<Score> score_requests(const models::Model& model, const std::vector<ScoreRequest>& requests,
                                                const ScoreOptions& options = {});

/// The published loop as an oracle and a baseline: one right-padded batch a case, padding computed, logits of all
/// positions of all rows, a log-softmax over the vocabulary for each scored token. Slow on purpose.
[[nodiscard]] std::vector<std::vector<Score>> score_cases_reference(const models::Model& model,
                                                                    const std::vector<std::vector<ScoreRequest>>& cases,
                                                                    const ScoreOptions& options = {});

/// Log-probabilities of the next token after each text: [texts, V], float32, on the CPU. For divergences between a
/// model before and after an edit.
[[nodiscard]] at::Tensor next_token_log_probs(const models::Model& model, const std::vector<std::string>& texts,
                                              const ScoreOptions& options = {});

}  // namespace emend::evaluation
