// One answer that is being generated: filled by the engine's thread, read by the thread of its request.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace emend::tools::serve {

struct AnswerOptions {
  std::vector<std::string> stop;
  int64_t max_tokens = 16;
  bool begins = false;     ///< a text of its own, as a chat's reply; else it goes on from the prompt
  int top_log_probs = -1;  ///< likeliest tokens beside each; -1: no log-probabilities at all
  std::chrono::steady_clock::time_point deadline;
};

struct AnswerToken {
  int64_t id = 0;
  double log_prob = 0;
  std::vector<std::pair<int64_t, double>> top;  ///< likeliest first
};

struct Piece {
  std::string text;
  std::vector<AnswerToken> tokens;  ///< only where log-probabilities are wanted
};

class Answer {
 public:
  Answer(const models::Tokenizer& tokenizer, AnswerOptions options)
      : options_(std::move(options)),
        tokenizer_(tokenizer),
        decoder_(tokenizer, /*skip_special=*/true, options_.begins) {}

  // The engine's side.
  void note_logits(int64_t id, const at::Tensor& logits_V);
  bool push(int64_t id);         ///< true: the answer ends with this token
  void end(const char* reason);  ///< without a further token
  void fail(std::exception_ptr error);
  [[nodiscard]] bool unwanted() const;  ///< the client has gone or its time is over

  // The request's side.
  /// Waits for more; false once all was given. Throws what fail() was given.
  bool next(Piece& piece);
  /// All of it.
  Piece whole();
  void abandon() {
    const std::lock_guard lock(mutex_);
    abandoned_ = true;
  }
  [[nodiscard]] std::string finish_reason() const {  ///< "stop" or "length"
    const std::lock_guard lock(mutex_);
    return reason_;
  }
  [[nodiscard]] int64_t tokens() const {
    const std::lock_guard lock(mutex_);
    return count_;
  }
  [[nodiscard]] double seconds_to_first() const;  ///< since it was made; 0 before

 private:
  void finish(const char* reason);
  [[nodiscard]] bool cut_at_stop();
  void release(size_t characters);

  const AnswerOptions options_;
  const models::Tokenizer& tokenizer_;
  models::StreamDecoder decoder_;
  mutable std::mutex mutex_;
  std::condition_variable more_;
  std::string pending_;               ///< may turn out to be the beginning of a stop string
  std::optional<AnswerToken> noted_;  ///< of the token that comes next; the engine's alone
  Piece ready_;
  std::string reason_;
  std::exception_ptr error_;
  int64_t count_ = 0;
  bool done_ = false, abandoned_ = false;
  std::chrono::steady_clock::time_point made_ = std::chrono::steady_clock::now(), first_ = made_;
};

}  // namespace emend::tools::serve
