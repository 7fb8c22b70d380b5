// The packed scorer.
//
// Legend: a *head* is a token sequence with which several rows begin, a *row* is a distinct prompt followed by its
// longest target without the last token, a *branch* is another target of the same prompt that leaves the row's tokens.
// A *position* is a token whose prediction is read. Heads run first and leave keys and values; rows continue them;
// branches continue rows.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/evaluation/detail/scoring.h>
#include <emend/evaluation/scoring.h>
#include <emend/models/config.h>
#include <emend/models/side_by_side.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <span>

namespace emend::evaluation {
namespace {

using Ids = std::vector<int64_t>;

/// One way to go on after a row's prompt; `positions[j]` predicts `labels[j]`.
struct Target {
  Ids labels;
  std::vector<size_t> positions;
};

struct Row {
  Ids ids;            // prompt, then all but the last label of the longest target
  int64_t begin = 0;  // tokens of the prompt
  int64_t whole = 0;  // length of the text where the model's rotary frequencies depend on it, else 0
  std::vector<Target> targets;
  size_t longest = 0;  // index into targets
  [[nodiscard]] int64_t size() const { return std::ssize(ids); }
};

/// Rows of one group that run in one pass.
struct Batch {
  struct Part {
    size_t group;
    std::vector<size_t> rows;
  };
  std::vector<Part> parts;
  int64_t tokens = 0, rows = 0, longest = 0, cached = 0;
};

/// What was read at the positions, and the requests that read it.
class Readings {
 public:
  size_t add_position() {
    wanted_.emplace_back();
    highest_.push_back(-1);
    return highest_.size() - 1;
  }
  void want(size_t position, int64_t label) { wanted_[position].emplace(label, 0.0); }
  [[nodiscard]] int64_t predicted(size_t position) const { return highest_[position]; }
  [[nodiscard]] double log_prob(size_t position, int64_t label) const { return wanted_.at(position).at(label); }

  /// Projects `tokens` of `hidden` (packed) and fills in `positions`; threads may do that for different positions.
  void read(const models::Model& model, const at::Tensor& hidden_ND, const std::vector<int64_t>& tokens,
            const std::vector<size_t>& positions, int64_t chunk) {
    for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(chunk)) {
      const size_t n = std::min(tokens.size() - at, static_cast<size_t>(chunk));
      const at::Tensor index = devices::route_like(at::tensor(at::ArrayRef<int64_t>(tokens.data() + at, n), at::kLong),
                                                   hidden_ND, devices::Purpose::kInput);
      const at::Tensor logits_MV = detail::wide_logits(model.project(hidden_ND.index_select(0, index)));
      read_logits(logits_MV, positions.data() + at, n);
    }
  }

 private:
  void read_logits(const at::Tensor& logits_MV, const size_t* positions, size_t n) {
    std::vector<int64_t> rows, labels;
    for (size_t i = 0; i < n; ++i)
      for (const auto& [label, value] : wanted_[positions[i]]) {
        rows.push_back(static_cast<int64_t>(i));
        labels.push_back(label);
      }
    const auto there = [&](const std::vector<int64_t>& values) {
      return devices::route_like(at::tensor(values, at::kLong), logits_MV, devices::Purpose::kLabels);
    };
    const auto host = [](const at::Tensor& x, at::ScalarType dtype) {
      return devices::to_host(x, devices::Purpose::kLogits).to(dtype).contiguous();
    };
    const at::Tensor row_index = there(rows);
    const at::Tensor norm_M = at::logsumexp(logits_MV, {-1});
    const at::Tensor value =
        host(logits_MV.index({row_index, there(labels)}) - norm_M.index_select(0, row_index), at::kDouble);
    const at::Tensor highest = host(logits_MV.argmax(-1), at::kLong);
    const double* values = value.const_data_ptr<double>();
    size_t k = 0;
    for (size_t i = 0; i < n; ++i) {
      highest_[positions[i]] = highest.const_data_ptr<int64_t>()[i];
      for (auto& [label, out] : wanted_[positions[i]]) {
        out = values[k++];
        if (!std::isfinite(out)) detail::not_finite("evaluation");
      }
    }
  }

  std::vector<int64_t> highest_;
  std::vector<std::map<int64_t, double>> wanted_;  // of each position
};

bool starts_with(const Ids& ids, const Ids& beginning, size_t length) {
  return ids.size() >= length && std::equal(beginning.begin(), beginning.begin() + length, ids.begin());
}

class Engine {
 public:
  Engine(const models::Model& model, const std::vector<ScoreRequest>& requests, const ScoreOptions& options)
      : model_(model), options_(options) {
    const auto encoded = detail::encode_requests(model.tokenizer(), requests);
    std::map<Ids, size_t> row_of, row_of_whole;
    const int64_t limit = sharing_limit();
    for (size_t i = 0; i < encoded.size(); ++i) {
      const auto& request = encoded[i];
      check_length(request, requests[i]);
      Ids prompt(request.ids.begin(), request.ids.begin() + request.begin);
      const auto length = std::ssize(request.ids);
      const bool alone = length > limit;
      const auto [at, is_new] =
          alone ? row_of_whole.emplace(request.ids, rows_.size()) : row_of.emplace(prompt, rows_.size());
      if (is_new) rows_.push_back({prompt, request.begin, alone ? length : 0, {}, 0});
      place_.emplace_back(at->second,
                          add_target(rows_[at->second], {request.ids.begin() + request.begin, request.ids.end()}));
    }
    for (auto& row : rows_) lay_out(row);
  }

  std::vector<Score> run() {
    auto groups = partition();
    const auto batches = make_batches(groups);
    // Batches of one large group go one after the other: they share its head.
    std::vector<std::span<const Batch>> sequences;
    for (const auto& batch : batches) {
      const auto* before = sequences.empty() ? nullptr : &sequences.back().back();
      const size_t group = batch.parts[0].group;
      if (before && before->parts.size() == 1 && batch.parts.size() == 1 && before->parts[0].group == group &&
          groups[group].shared > 0)
        sequences.back() = {sequences.back().data(), sequences.back().size() + 1};
      else
        sequences.emplace_back(&batch, 1);
    }
    std::mutex mutex;
    int64_t done = 0;
    models::side_by_side(model_, std::ssize(sequences), [&](int64_t sequence) {
      models::KvCache head(model_.n_layers());
      for (const auto& batch : sequences[static_cast<size_t>(sequence)]) {
        options_.cancel.check("evaluation");
        run_batch(groups, batch, head);
        const std::lock_guard lock(mutex);
        done += batch.rows;
        if (options_.progress)
          options_.progress({options_.phase, static_cast<double>(done), static_cast<double>(rows_.size()),
                             std::to_string(done) + "/" + std::to_string(rows_.size()) + " prompts"});
      }
    });
    std::vector<Score> scores;
    scores.reserve(place_.size());
    for (const auto& [row, target] : place_) scores.push_back(score_of(rows_[row].targets[target]));
    return scores;
  }

 private:
  /// Texts longer than this have keys that depend on the whole text's length (dynamic rotary forms): nothing of them is
  /// shared.
  [[nodiscard]] int64_t sharing_limit() const {
    int64_t limit = std::numeric_limits<int64_t>::max();
    for (const auto& rotary : model_.config().rotaries)
      if (rotary.depends_on_length()) limit = std::min(limit, rotary.original_max);
    return limit;
  }

  void check_length(const EncodedRequest& encoded, const ScoreRequest& request) const {
    if (model_.config().positions != models::Positions::kLearned) return;
    const auto length = std::ssize(encoded.ids) - 1;
    if (length > model_.max_positions())
      refuse({"score of " + detail::quoted(request), std::to_string(length) + " tokens",
              "at most " + std::to_string(model_.max_positions()) + ", the size of the model's position table",
              "shorten or leave out this fact"});
  }

  static size_t add_target(Row& row, Ids labels) {
    for (size_t t = 0; t < row.targets.size(); ++t)
      if (row.targets[t].labels == labels) return t;
    row.targets.push_back({std::move(labels), {}});
    return row.targets.size() - 1;
  }

  /// Puts the longest target's tokens behind the prompt and gives every prediction its position.
  void lay_out(Row& row) {
    for (size_t t = 0; t < row.targets.size(); ++t)
      if (row.targets[t].labels.size() > row.targets[row.longest].labels.size()) row.longest = t;
    Target& longest = row.targets[row.longest];
    row.ids.insert(row.ids.end(), longest.labels.begin(), longest.labels.end() - 1);
    for (size_t j = 0; j < longest.labels.size(); ++j) longest.positions.push_back(readings_.add_position());
    for (auto& target : row.targets) {
      if (&target != &longest) {
        const bool on_row = starts_with(longest.labels, target.labels, target.labels.size() - 1);
        target.positions.push_back(longest.positions[0]);
        for (size_t j = 1; j < target.labels.size(); ++j)
          target.positions.push_back(on_row ? longest.positions[j] : readings_.add_position());
      }
      for (size_t j = 0; j < target.labels.size(); ++j) readings_.want(target.positions[j], target.labels[j]);
    }
  }

  [[nodiscard]] static bool is_branch(const Row& row, const Target& target) {
    return target.labels.size() > 1 && target.positions[1] != row.targets[row.longest].positions[1];
  }

  std::vector<models::SharedGroup> partition() const {
    std::vector<Ids> beginnings;
    for (const auto& row : rows_)
      beginnings.emplace_back(row.ids.begin(), row.ids.begin() + (row.whole == 0 ? row.begin - 1 : 0));
    return models::share_beginnings(beginnings, /*least=*/8);
  }

  /// Rows of similar length together; groups with and without a head apart. Bounds: tokens of a pass, padding inside
  /// attention, and tokens of copied keys and values.
  std::vector<Batch> make_batches(std::vector<models::SharedGroup>& groups) const {
    const auto length = [&](const models::SharedGroup& group) {
      int64_t longest = 0;
      for (size_t row : group.rows) longest = std::max(longest, rows_[row].size() - group.shared);
      return longest;
    };
    for (auto& group : groups)
      std::ranges::stable_sort(group.rows, [&](size_t a, size_t b) { return rows_[a].size() > rows_[b].size(); });
    std::ranges::stable_sort(groups, [&](const auto& a, const auto& b) {
      if ((a.shared > 0) != (b.shared > 0)) return a.shared > 0;
      return length(a) > length(b);
    });
    std::vector<Batch> batches;
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto& group = groups[g];
      for (size_t row : group.rows) {
        const int64_t size = rows_[row].size() - group.shared;
        const bool new_kind =
            batches.empty() || (groups[batches.back().parts[0].group].shared > 0) != (group.shared > 0);
        if (new_kind || !fits(batches.back(), size, group.shared)) batches.emplace_back();
        Batch& batch = batches.back();
        if (batch.parts.empty() || batch.parts.back().group != g) {
          batch.parts.push_back({g, {}});
          batch.tokens += group.shared;
        }
        batch.parts.back().rows.push_back(row);
        batch.tokens += size;
        batch.rows += 1;
        batch.longest = std::max(batch.longest, size);
        batch.cached += group.shared;
      }
    }
    return batches;
  }

  [[nodiscard]] bool fits(const Batch& batch, int64_t size, int64_t shared) const {
    const int64_t limit = options_.batch_tokens;
    return batch.tokens + size + shared <= limit && (batch.rows + 1) * std::max(batch.longest, size) <= 2 * limit &&
           batch.cached + shared <= 4 * limit;
  }

  /// `head`: keys and values of the batch's heads; those of a lone large group are there already for its next batch.
  void run_batch(const std::vector<models::SharedGroup>& groups, const Batch& batch, models::KvCache& head) {
    const bool shared = groups[batch.parts[0].group].shared > 0;
    std::vector<Ids> tails;
    std::vector<int64_t> begins, head_of, whole;
    std::vector<const Row*> rows;
    bool branches = false;
    for (size_t p = 0; p < batch.parts.size(); ++p)
      for (size_t r : batch.parts[p].rows) {
        const Row& row = rows_[r];
        const int64_t begin = groups[batch.parts[p].group].shared;
        tails.emplace_back(row.ids.begin() + begin, row.ids.end());
        begins.push_back(begin);
        head_of.push_back(static_cast<int64_t>(p));
        whole.push_back(row.whole);
        rows.push_back(&row);
        for (const auto& target : row.targets) branches = branches || is_branch(row, target);
      }
    models::KvCache cache(model_.n_layers());
    if (shared && head.empty()) read_heads(groups, batch, head);
    if (shared) cache = head.select_rows(head_of);
    auto tokens = shared ? models::TokenBatch::continuing(tails, begins) : models::TokenBatch::from_rows(tails);
    tokens.set_full_lengths(whole);
    const at::Tensor hidden = forward(tokens, shared || branches ? &cache : nullptr, branches);
    std::vector<int64_t> read;
    std::vector<size_t> positions;
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto& longest = rows[i]->targets[rows[i]->longest].positions;
      for (size_t j = 0; j < longest.size(); ++j) {
        read.push_back(tokens.token(static_cast<int64_t>(i), rows[i]->begin - 1 - begins[i] + static_cast<int64_t>(j)));
        positions.push_back(longest[j]);
      }
    }
    readings_.read(model_, hidden, read, positions, options_.project_rows);
    if (branches) run_branches(rows, cache);
  }

  void read_heads(const std::vector<models::SharedGroup>& groups, const Batch& batch, models::KvCache& head) {
    std::vector<Ids> heads;
    for (const auto& part : batch.parts) {
      const Row& row = rows_[part.rows[0]];
      heads.emplace_back(row.ids.begin(), row.ids.begin() + groups[part.group].shared);
    }
    (void)forward(models::TokenBatch::from_rows(heads), &head, true);
  }

  void run_branches(const std::vector<const Row*>& rows, models::KvCache& cache) {
    std::vector<int64_t> prompt_lengths;
    for (const Row* row : rows) prompt_lengths.push_back(row->begin);
    cache.truncate(prompt_lengths);
    struct Branch {
      int64_t row;
      const Target* target;
    };
    std::vector<Branch> branches;
    for (size_t i = 0; i < rows.size(); ++i)
      for (const auto& target : rows[i]->targets)
        if (is_branch(*rows[i], target)) branches.push_back({static_cast<int64_t>(i), &target});
    for (size_t at = 0; at < branches.size();) {
      std::vector<Ids> tails;
      std::vector<int64_t> from, begins;
      int64_t tokens = 0, cached = 0;
      const size_t first = at;
      for (; at < branches.size(); ++at) {
        const auto& [row, target] = branches[at];
        const auto size = std::ssize(target->labels) - 1;
        const int64_t begin = rows[row]->begin;
        if (at > first && (tokens + size > options_.batch_tokens || cached + begin > 4 * options_.batch_tokens)) break;
        tails.emplace_back(target->labels.begin(), target->labels.end() - 1);
        from.push_back(row);
        begins.push_back(begin);
        tokens += size;
        cached += begin;
      }
      models::KvCache selected = cache.select_rows(from);
      const auto batch = models::TokenBatch::continuing(tails, begins);
      const at::Tensor hidden = forward(batch, &selected, false);
      std::vector<int64_t> read;
      std::vector<size_t> positions;
      for (size_t i = first; i < at; ++i)
        for (size_t j = 1; j < branches[i].target->labels.size(); ++j) {
          read.push_back(batch.token(static_cast<int64_t>(i - first), static_cast<int64_t>(j) - 1));
          positions.push_back(branches[i].target->positions[j]);
        }
      readings_.read(model_, hidden, read, positions, options_.project_rows);
    }
  }

  at::Tensor forward(const models::TokenBatch& batch, models::KvCache* cache, bool append) {
    models::ForwardOptions options;
    options.cache = cache;
    options.append = append;
    options.logit_tokens.emplace();
    return model_.forward(batch, options).needed_hidden();
  }

  [[nodiscard]] Score score_of(const Target& target) const {
    Score score;
    score.labels = target.labels;
    for (size_t j = 0; j < target.labels.size(); ++j) {
      score.predicted.push_back(readings_.predicted(target.positions[j]));
      score.log_probs.push_back(readings_.log_prob(target.positions[j], target.labels[j]));
    }
    return score;
  }

  const models::Model& model_;
  const ScoreOptions& options_;
  std::vector<Row> rows_;
  std::vector<std::pair<size_t, size_t>> place_;  // request → row, target
  Readings readings_;
};

}  // namespace

std::vector<Score> score_requests(const models::Model& model, const std::vector<ScoreRequest>& requests,
                                  const ScoreOptions& options) {
  const at::NoGradGuard no_grad;
  if (options.batch_tokens <= 0 || options.project_rows <= 0)
    refuse({"scoring", "batch_tokens or project_rows below 1", "positive numbers", ""});
  if (!options.sharing.alone()) return detail::share_scores(model, requests, options);
  return Engine(model, requests, options).run();
}

}  // namespace emend::evaluation
