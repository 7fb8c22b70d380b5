// Greedy and sampled continuation with a key-value cache.
#pragma once

#include <emend/core/cancel.h>
#include <emend/models/model.h>

#include <functional>
#include <string>
#include <vector>

namespace emend::models {

struct GenerateOptions {
  int64_t max_new_tokens = 64;
  /// Sampling is off (greedy) when temperature is 0.
  double temperature = 0;
  int64_t top_k = 0;                ///< 0: no limit
  double top_p = 1.0;               ///< 1: no limit
  double min_p = 0;                 ///< 0: no limit
  double repetition_penalty = 1.0;  ///< 1: none
  uint64_t seed = 0;
  std::vector<int64_t> stop_ids;  ///< usually the end-of-sequence ids; empty: never stop early
  int64_t prefill_chunk = 512;    ///< tokens of a long prompt per pass; memory is linear in the prompt's length
  /// Called with (row, token id) as tokens are chosen.
  std::function<void(int64_t, int64_t)> on_token;
  /// Asked with (row, token id) after a token was added: true ends that row. None: rows end by stop_ids and length.
  std::function<bool(int64_t, int64_t)> ends;
  CancelToken cancel;
};

/// Continues every prompt, batched; returns only the new tokens of each (the stop id is not included).
/// Each row is independent of the others and of the batch it is in: its random stream depends on `seed` and its row
/// number.
[[nodiscard]] std::vector<std::vector<int64_t>> generate(const Model& model,
                                                         const std::vector<std::vector<int64_t>>& prompts,
                                                         const GenerateOptions& options);

}  // namespace emend::models
