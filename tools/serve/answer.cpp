#include "answer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "http.h"

namespace emend::tools::serve {

using Clock = std::chrono::steady_clock;

void Answer::note_logits(int64_t id, const at::Tensor& logits_V) {
  const at::Tensor log_probs = at::log_softmax(logits_V.to(at::kDouble), -1);
  AnswerToken token{id, log_probs[id].item<double>(), {}};
  if (const int64_t k = std::min<int64_t>(options_.top_log_probs, log_probs.numel()); k > 0) {
    const auto [values, ids] = log_probs.topk(k);
    for (int64_t i = 0; i < k; ++i) token.top.emplace_back(ids[i].item<int64_t>(), values[i].item<double>());
  }
  noted_ = std::move(token);
}

bool Answer::push(int64_t id) {
  const std::lock_guard lock(mutex_);
  if (count_ == 0) first_ = Clock::now();
  const auto& ends = tokenizer_.eos_ids();
  const bool end = std::ranges::find(ends, id) != ends.end();
  if (end) {
    pending_ += decoder_.finish();
  } else {
    ++count_;
    if (noted_) ready_.tokens.push_back(std::move(*noted_));
    pending_ += decoder_.push(id);
  }
  const bool cut = cut_at_stop();
  if (cut) (void)decoder_.finish();  // bytes behind the stop
  if (cut || end)
    finish("stop");
  else if (count_ >= options_.max_tokens || abandoned_ || Clock::now() > options_.deadline)
    finish("length");
  return done_;
}

// Gives out what cannot be the beginning of a stop string; true if there is a whole one.
bool Answer::cut_at_stop() {
  size_t found = std::string::npos, held = 0;
  for (const auto& stop : options_.stop) {
    found = std::min(found, pending_.find(stop));
    for (size_t n = std::min(stop.size() - 1, pending_.size()); n > held; --n)
      if (pending_.ends_with(std::string_view(stop).substr(0, n))) held = n;
  }
  if (found == std::string::npos) {
    release(pending_.size() - held);
    return false;
  }
  release(found);
  pending_.clear();
  return true;
}

void Answer::release(size_t characters) {
  ready_.text += pending_.substr(0, characters);
  pending_.erase(0, characters);
  more_.notify_all();
}

void Answer::finish(const char* reason) {
  pending_ += decoder_.finish();
  release(pending_.size());
  reason_ = reason;
  done_ = true;
}

void Answer::end(const char* reason) {
  const std::lock_guard lock(mutex_);
  finish(reason);
}

void Answer::fail(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (done_) return;
  error_ = std::move(error);
  reason_ = "error";
  done_ = true;
  more_.notify_all();
}

bool Answer::unwanted() const {
  const std::lock_guard lock(mutex_);
  return abandoned_ || Clock::now() > options_.deadline;
}

bool Answer::next(Piece& piece) {
  std::unique_lock lock(mutex_);
  const auto some = [&] { return done_ || !ready_.text.empty() || !ready_.tokens.empty(); };
  // A row that runs ends itself at its next token; one that waits is not begun any more.
  if (!more_.wait_until(lock, options_.deadline + std::chrono::seconds(5), some)) {
    abandoned_ = true;
    throw HttpError(503, "the time for this request is over before the model came to it");
  }
  if (error_) std::rethrow_exception(error_);
  piece = std::move(ready_);
  ready_ = {};
  return !piece.text.empty() || !piece.tokens.empty();
}

Piece Answer::whole() {
  Piece all;
  for (Piece piece; next(piece);) {
    all.text += piece.text;
    std::move(piece.tokens.begin(), piece.tokens.end(), std::back_inserter(all.tokens));
  }
  return all;
}

double Answer::seconds_to_first() const {
  const std::lock_guard lock(mutex_);
  return std::chrono::duration<double>(first_ - made_).count();
}

}  // namespace emend::tools::serve
