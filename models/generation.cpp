#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/models/config.h>
#include <emend/models/detail/sampling.h>
#include <emend/models/generation.h>

#include <algorithm>

namespace emend::models {
namespace {

using Rows = std::vector<std::vector<int64_t>>;

void refuse(const std::string& got, const std::string& expected, const std::string& advice) {
  throw Error(ErrorClass::kInvalidArgument, {"generation", got, expected, advice});
}

void check_options(const Model& model, const Rows& prompts, const GenerateOptions& options) {
  if (options.max_new_tokens < 0) refuse("max_new_tokens " + std::to_string(options.max_new_tokens), "0 or more", "");
  if (!(options.temperature >= 0))
    refuse("temperature " + std::to_string(options.temperature), "0 (greedy) or more", "");
  if (options.top_k < 0) refuse("top_k " + std::to_string(options.top_k), "0 (no limit) or more", "");
  if (!(options.top_p > 0 && options.top_p <= 1))
    refuse("top_p " + std::to_string(options.top_p), "above 0, at most 1", "");
  if (!(options.min_p >= 0 && options.min_p <= 1)) refuse("min_p " + std::to_string(options.min_p), "0 to 1", "");
  if (!(options.repetition_penalty > 0))
    refuse("repetition_penalty " + std::to_string(options.repetition_penalty), "a positive number, 1 for none", "");
  if (options.prefill_chunk < 1) refuse("prefill_chunk " + std::to_string(options.prefill_chunk), "1 or more", "");
  for (size_t r = 0; r < prompts.size(); ++r) {
    if (prompts[r].empty())
      refuse("prompt " + std::to_string(r) + " has no tokens", "at least one token", "start with the BOS token");
    const int64_t length = static_cast<int64_t>(prompts[r].size()) + options.max_new_tokens;
    if (model.config().positions == Positions::kLearned && length > model.max_positions() + 1)
      refuse("prompt " + std::to_string(r) + " of " + std::to_string(prompts[r].size()) + " tokens with " +
                 std::to_string(options.max_new_tokens) + " new ones",
             "at most " + std::to_string(model.max_positions()) + " tokens, the size of the model's position table",
             "shorten the prompt or ask for fewer tokens");
  }
}

// One batch of prompts that are prefilled and continued together.
class Continuation {
 public:
  Continuation(const Model& model, const Rows& prompts, std::vector<int64_t> rows, const GenerateOptions& options,
               Rows& results)
      : model_(model), options_(options), results_(results), rows_(std::move(rows)), cache_(model.n_layers()) {
    int64_t longest = 0;
    for (const int64_t r : rows_) {
      texts_.push_back(prompts[r]);
      random_.emplace_back(options.seed, r);
      longest = std::max(longest, static_cast<int64_t>(prompts[r].size()));
    }
    done_.assign(rows_.size(), false);
    cache_ = KvCache(model.n_layers(), longest + std::min<int64_t>(options.max_new_tokens, 256));
  }

  void run(int64_t passes) {
    at::Tensor logits = prefill(passes);
    for (int64_t step = 0;; ++step) {
      choose(logits);
      if (step + 1 == options_.max_new_tokens || n_done_ == rows_.size()) return;
      options_.cancel.check("generation");
      if (4 * n_done_ > rows_.size()) drop_finished();
      Rows next;
      for (const auto& text : texts_) next.push_back({text.back()});
      TokenBatch batch = TokenBatch::continuing(next, cache_.lengths());
      ForwardOptions pass;
      pass.cache = &cache_;
      logits = model_.forward(batch, pass).logits;
    }
  }

 private:
  // Every row in `passes` nearly even parts, so that no pass has more than a chunk of any row.
  at::Tensor prefill(int64_t passes) {
    std::vector<int64_t> full;
    for (const auto& text : texts_) full.push_back(static_cast<int64_t>(text.size()));
    at::Tensor logits;
    for (int64_t p = 0; p < passes; ++p) {
      options_.cancel.check("generation");
      Rows parts;
      std::vector<int64_t> begins;
      for (const auto& text : texts_) {
        const int64_t n = static_cast<int64_t>(text.size());
        begins.push_back(n * p / passes);
        parts.emplace_back(text.begin() + n * p / passes, text.begin() + n * (p + 1) / passes);
      }
      TokenBatch batch = TokenBatch::continuing(parts, begins);
      batch.set_full_lengths(full);
      ForwardOptions pass;
      pass.cache = &cache_;
      pass.logit_tokens.emplace();
      if (p + 1 == passes)
        for (int64_t r = 0; r < batch.rows(); ++r) pass.logit_tokens->push_back(batch.token(r, -1));
      logits = model_.forward(batch, pass).logits;
    }
    return logits;
  }

  void choose(const at::Tensor& logits) {
    const bool plain = options_.temperature == 0 && options_.repetition_penalty == 1.0;
    const at::Tensor host = plain ? devices::to_host(logits.argmax(-1), devices::Purpose::kLogits)
                                  : devices::to_host(logits, devices::Purpose::kLogits).to(at::kFloat).contiguous();
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (done_[i]) {
        texts_[i].push_back(texts_[i].back());  // keeps its place in the batch; nobody reads it
        continue;
      }
      const int64_t row = static_cast<int64_t>(i);
      int64_t id;
      if (plain) {
        id = host[row].item<int64_t>();
      } else {
        float* scores = host[row].mutable_data_ptr<float>();
        detail::penalise_repetition(scores, host.size(1), texts_[i], options_.repetition_penalty);
        id = detail::choose_token(scores, host.size(1), options_, random_[i]);
      }
      texts_[i].push_back(id);
      if (std::find(options_.stop_ids.begin(), options_.stop_ids.end(), id) != options_.stop_ids.end()) {
        done_[i] = true;
        ++n_done_;
        continue;
      }
      results_[rows_[i]].push_back(id);
      if (options_.on_token) options_.on_token(rows_[i], id);
      if (options_.ends && options_.ends(rows_[i], id)) {
        done_[i] = true;
        ++n_done_;
      }
    }
  }

  void drop_finished() {
    std::vector<int64_t> kept;
    for (size_t i = 0; i < rows_.size(); ++i)
      if (!done_[i]) kept.push_back(static_cast<int64_t>(i));
    cache_ = cache_.select_rows(kept);
    for (size_t i = 0; i < kept.size(); ++i) {
      if (static_cast<int64_t>(i) == kept[i]) continue;
      rows_[i] = rows_[kept[i]];
      texts_[i] = std::move(texts_[kept[i]]);
      random_[i] = random_[kept[i]];
    }
    rows_.resize(kept.size());
    texts_.resize(kept.size());
    random_.erase(random_.begin() + static_cast<int64_t>(kept.size()), random_.end());
    done_.assign(kept.size(), false);
    n_done_ = 0;
  }

  const Model& model_;
  const GenerateOptions& options_;
  Rows& results_;
  std::vector<int64_t> rows_;
  Rows texts_;  // prompt and what was chosen
  std::vector<detail::RowRandom> random_;
  std::vector<bool> done_;
  size_t n_done_ = 0;
  KvCache cache_;
};

}  // namespace

Rows generate(const Model& model, const Rows& prompts, const GenerateOptions& options) {
  check_options(model, prompts, options);
  Rows results(prompts.size());
  if (options.max_new_tokens == 0) return results;
  const at::NoGradGuard no_grad;
  std::vector<int64_t> waiting(prompts.size());
  for (size_t r = 0; r < prompts.size(); ++r) waiting[r] = static_cast<int64_t>(r);
  // A prompt with fewer tokens than the longest one has passes cannot be split that often: it goes with the next group.
  while (!waiting.empty()) {
    int64_t longest = 0;
    for (const int64_t r : waiting) longest = std::max(longest, static_cast<int64_t>(prompts[r].size()));
    const int64_t passes = (longest + options.prefill_chunk - 1) / options.prefill_chunk;
    std::vector<int64_t> together, later;
    for (const int64_t r : waiting) (static_cast<int64_t>(prompts[r].size()) >= passes ? together : later).push_back(r);
    Continuation(model, prompts, together, options, results).run(passes);
    waiting = std::move(later);
  }
  return results;
}

}  // namespace emend::models
