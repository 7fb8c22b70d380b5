// Greedy and sampled continuation with a key-value cache: of prompts at once, and of rows that come and go.
//
// A greedy row may bring drafts: texts that its answer may turn out to be, or to resemble (what the model wrote before
// a change). A pass then reads several of a draft's tokens at once and keeps those that greedy decoding would have
// chosen ("Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192, with given drafts). What is
// written is what plain decoding writes; passes of another shape add in another order, so a tie within rounding can
// fall the other way, as it can between batches of different sizes.
#pragma once

#include <emend/core/cancel.h>
#include <emend/models/model.h>

#include <cstdint>
#include <exception>
#include <functional>

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
  int64_t first_row = 0;               ///< added to a row's number for its random stream: of prompts that come in parts
  std::vector<int64_t> stop_ids = {};  ///< usually the end-of-sequence ids; empty: never stop early
  /// Of drafts: as if so many tokens before their first had been right. It decides how many are checked at once.
  int64_t trust = 4;
  int64_t prefill_chunk = 512;  ///< tokens of a long prompt per pass; memory is linear in the prompt's length
  /// Called with (row, token id) as tokens are chosen.
  std::function<void(int64_t, int64_t)> on_token = {};
  /// Asked with (row, token id) after a token was added: true ends that row. None: rows end by stop_ids and length.
  std::function<bool(int64_t, int64_t)> ends = {};
  /// Called before on_token with (row, token id, logits [V] on the host, float32). Setting it costs a copy of them.
  std::function<void(int64_t, int64_t, const at::Tensor&)> on_logits = {};
  /// Called with (row, error) where a row's logits are not finite, which then ends it alone. None: the error is thrown.
  std::function<void(int64_t, const std::exception_ptr&)> on_error = {};
  CancelToken cancel = {};
};

/// Texts that an answer may be, token ids without the prompt; likely ones first.
using Drafts = std::vector<std::vector<int64_t>>;

/// One text that a RunningBatch continues.
struct BatchRow {
  std::vector<int64_t> text;                       ///< the prompt; the batch puts behind it what it chooses
  std::shared_ptr<const GenerateOptions> options;  ///< this row's own; callbacks are called with `row`
  int64_t row = 0;                                 ///< with first_row and the seed, decides the random stream
  int64_t group = 0;                               ///< the caller's, for before_pass
  Drafts drafts = {};                              ///< of greedy rows; others do not look at them
};

/// Rows with a key-value cache that are continued together, and come and go. A row's tokens depend on no other row.
class RunningBatch {
 public:
  /// Called before a pass with its tokens and the group of each of its rows.
  using BeforePass = std::function<void(const TokenBatch&, const std::vector<int64_t>& groups)>;
  explicit RunningBatch(const Model& model, BeforePass before_pass = {});
  ~RunningBatch();
  RunningBatch(const RunningBatch&) = delete;
  RunningBatch& operator=(const RunningBatch&) = delete;

  /// Prefills these rows together and chooses the first token of each. Throws Error(kInvalidArgument) for options or
  /// prompts that cannot be, with nothing added, and what a callback throws.
  void add(std::vector<BatchRow> rows);
  /// One more token for every row that has not ended; more for those whose drafts are right.
  void step();
  [[nodiscard]] size_t active() const noexcept;  ///< rows that have not ended
  [[nodiscard]] int64_t cache_bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// How far the rows of a pass are in their answers, for hooks that act by that: tensors do not show it.
struct RunningPass {
  const TokenBatch& batch;
  std::vector<int64_t> answered;  ///< by token: tokens of the answer up to it, itself included; 0: of the prompt

  /// Of the thread; null while no text is being continued (generation.h).
  [[nodiscard]] static const RunningPass* now() noexcept;
};

/// Throws Error(kInvalidArgument) naming `where` for a prompt that is longer than what the model was made for: it would
/// take minutes and end in noise. Models whose rotary frequencies grow with the text have no such length.
void require_room(const Model& model, const std::vector<int64_t>& prompt, const std::string& where);

/// Tokens that a model with learned positions has room for behind a prompt of this length, the last one not read; of
/// other models as many as one likes.
[[nodiscard]] int64_t room_behind(const Model& model, int64_t prompt_tokens);

/// Continues every prompt, batched, many without callbacks in groups by cores (groups_of_rows); returns only the new
/// tokens of each (the stop id is not included). Each row is independent of the others and of the batch it is in: its
/// random stream depends on `seed` and on `first_row` and its row number. `drafts`: of each prompt, or none; they save
/// time where they are right and change nothing. Throws Error(kInvalidArgument) for another number of them.
[[nodiscard]] std::vector<std::vector<int64_t>> generate(const Model& model,
                                                         const std::vector<std::vector<int64_t>>& prompts,
                                                         const GenerateOptions& options,
                                                         std::vector<Drafts> drafts = {});

/// As `generate`, in one batch: for callers that give every core texts of its own, or read a few.
[[nodiscard]] std::vector<std::vector<int64_t>> generate_together(const Model& model,
                                                                  const std::vector<std::vector<int64_t>>& prompts,
                                                                  const GenerateOptions& options,
                                                                  std::vector<Drafts> drafts = {});

}  // namespace emend::models
