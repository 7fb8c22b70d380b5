#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/models/config.h>
#include <emend/models/detail/drafts.h>
#include <emend/models/detail/sampling.h>
#include <emend/models/generation.h>
#include <emend/models/side_by_side.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <tuple>

namespace emend::models {
// What RunningBatch::State has: with linkage, as that has.
namespace detail {

struct LiveRow : BatchRow {
  LiveRow(BatchRow row) : BatchRow(std::move(row)), random(options->seed, options->first_row + this->row) {}
  detail::RowRandom random;
  int64_t chosen = 0, wrong = 0;  // tokens; passes that checked a wrong one
  bool done = false;

  [[nodiscard]] std::span<const int64_t> answer() const { return std::span(text).last(static_cast<size_t>(chosen)); }
  [[nodiscard]] bool plain() const {
    return options->temperature == 0 && options->repetition_penalty == 1.0 && !options->on_logits;
  }
  void take(int64_t id) {
    text.push_back(id);
    const auto& stops = options->stop_ids;
    done = std::ranges::find(stops, id) != stops.end();
    if (done) return;
    ++chosen;
    if (options->on_token) options->on_token(row, id);
    done = (options->ends && options->ends(row, id)) || chosen == options->max_new_tokens;
  }
  void fail(const Error& error) {
    if (!options->on_error) throw error;
    options->on_error(row, std::make_exception_ptr(error));
    done = true;
  }
  void choose(const at::Tensor& logits_V) {
    const bool penal = options->repetition_penalty != 1.0;
    const at::Tensor scores = penal && options->on_logits ? logits_V.clone() : logits_V;
    float* values = scores.mutable_data_ptr<float>();
    detail::penalise_repetition(values, scores.numel(), text, options->repetition_penalty);
    const int64_t id = detail::choose_token(values, scores.numel(), *options, random);
    if (options->on_logits) options->on_logits(row, id, logits_V);
    take(id);
  }
};

}  // namespace detail

namespace {

using detail::LiveRow;
using Rows = std::vector<std::vector<int64_t>>;

constexpr int64_t kLogitsAtOnce = int64_t{1} << 25;  // of a pass with guessed tokens: 128 MiB in float32

void check_row(const Model& model, const BatchRow& row) {
  if (!row.options) refuse({"generation", "a row without options", "GenerateOptions", ""});
  const auto& options = *row.options;
  const auto require = [](bool good, const char* name, auto value, const char* expected) {
    if (!good) refuse({"generation", name + (" " + std::to_string(value)), expected, ""});
  };
  require(options.max_new_tokens >= 0, "max_new_tokens", options.max_new_tokens, "0 or more");
  require(options.temperature >= 0, "temperature", options.temperature, "0 (greedy) or more");
  require(options.top_k >= 0, "top_k", options.top_k, "0 (no limit) or more");
  require(options.top_p > 0 && options.top_p <= 1, "top_p", options.top_p, "above 0, at most 1");
  require(options.min_p >= 0 && options.min_p <= 1, "min_p", options.min_p, "0 to 1");
  require(options.repetition_penalty > 0, "repetition_penalty", options.repetition_penalty,
          "a positive number, 1 for none");
  require(options.prefill_chunk >= 1, "prefill_chunk", options.prefill_chunk, "1 or more");
  const std::string prompt = "prompt " + std::to_string(row.row);
  if (row.text.empty())
    refuse({"generation", prompt + " has no tokens", "at least one token", "start with the BOS token"});
  if (options.max_new_tokens > room_behind(model, std::ssize(row.text)))
    refuse({"generation",
            prompt + " of " + std::to_string(row.text.size()) + " tokens with " +
                std::to_string(options.max_new_tokens) + " new ones",
            "at most " + std::to_string(model.max_positions()) + " tokens, the size of the model's position table",
            "shorten the prompt or ask for fewer tokens"});
}

Error not_finite() {
  return {ErrorClass::kNumeric,
          {"generation", "logits with NaN or infinite entries", "finite numbers",
           "if the model was changed or steered, change it less; if its dtype is float16, load it as another"}};
}

// Chooses from the logits behind each row's next tokens [N, V]: the first, and guessed ones as long as they are right.
void choose_all(const at::Tensor& logits, std::span<LiveRow> rows, const Rows& next) {
  const bool plain = std::ranges::all_of(rows, [](const LiveRow& row) { return row.done || row.plain(); });
  const auto [largest, at_largest] = logits.max(-1);  // NaN where there is one
  // One read; ids are whole in float64.
  const at::Tensor host = plain ? devices::to_host(at::stack({at_largest.to(at::kDouble), largest.to(at::kDouble)}, 1),
                                                   devices::Purpose::kLogits)
                                : devices::to_host(logits, devices::Purpose::kLogits).to(at::kFloat).contiguous();
  const at::Tensor finite = at::isfinite(plain ? host.select(1, 1) : host.amax(-1));
  const bool all_finite = finite.all().item<bool>();
  int64_t token = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    LiveRow& row = rows[i];
    const auto n = std::ssize(next[i]);
    if (!all_finite && !row.done && !finite.narrow(0, token, n).all().item<bool>()) row.fail(not_finite());
    if (row.done) row.text.push_back(row.text.back());  // keeps its place in the batch; nobody reads it
    for (int64_t k = 0; k < n && !row.done; ++k) {
      if (plain)
        row.take(static_cast<int64_t>(host[token + k][0].item<double>()));
      else
        row.choose(host[token + k]);
      if (k + 1 < n && row.text.back() != next[i][static_cast<size_t>(k + 1)]) {
        ++row.wrong;
        break;
      }
    }
    token += n;
  }
}

// How many tokens a row of so many may get in one pass: where rotary frequencies depend on the length of the text, each
// token of a longer one has to see its own, and those of the prompt the prompt's (`fresh`).
int64_t longest_pass(const ModelConfig& config, int64_t length, bool fresh) {
  int64_t most = std::numeric_limits<int64_t>::max();
  for (const auto& rotary : config.rotaries) {
    if (!rotary.depends_on_length()) continue;
    if (fresh) return 1;
    if (config.position_rule == PositionRule::kColumns) continue;  // decided by the prompt alone
    most = std::min(most, rotary.original_max - length + 1);
  }
  return most;
}

int64_t passes_of(const std::vector<LiveRow>& rows) {
  int64_t passes = 1;
  for (const auto& row : rows) {
    const int64_t chunk = row.options->prefill_chunk;
    passes = std::max(passes, (std::ssize(row.text) + chunk - 1) / chunk);
  }
  return passes;
}

thread_local const RunningPass* running_pass = nullptr;

struct ShownPass {
  explicit ShownPass(const RunningPass& pass) : outer(std::exchange(running_pass, &pass)) {}
  ~ShownPass() { running_pass = outer; }
  ShownPass(const ShownPass&) = delete;
  ShownPass& operator=(const ShownPass&) = delete;
  const RunningPass* outer;  // of a text whose hook continues another one
};

}  // namespace

const RunningPass* RunningPass::now() noexcept {
  return running_pass;
}

struct RunningBatch::State {
  const Model& model;
  BeforePass before_pass;
  std::vector<LiveRow> rows;
  KvCache cache;

  at::Tensor run(const TokenBatch& batch, const std::vector<LiveRow>& of, ForwardOptions pass) const {
    if (before_pass) before_pass(batch, mapped(of, &LiveRow::group));
    RunningPass mine{batch, {}};
    for (int64_t r = 0; r < batch.rows(); ++r) {
      const auto& row = of[static_cast<size_t>(r)];
      const int64_t prompt = std::ssize(row.text) - row.chosen;
      for (int64_t k = 0; k < batch.length(r); ++k)
        mine.answered.push_back(
            std::max<int64_t>(0, batch.columns()[static_cast<size_t>(batch.token(r, k))] + 1 - prompt));
    }
    const ShownPass shown(mine);
    const ForwardResult result = model.forward(batch, pass);
    return result.stopped ? result.needed_logits() : result.logits;  // none of a part of a prompt
  }

  // What all rows of one group begin with, once; 0 tokens where that is not worth it.
  int64_t prefill_beginning(const std::vector<LiveRow>& added, KvCache& filled) const {
    Rows texts;
    int64_t longest = 0, chunk = std::numeric_limits<int64_t>::max();
    for (const auto& row : added) {
      if (row.group != added[0].group) return 0;
      texts.push_back(row.text);
      longest = std::max(longest, std::ssize(row.text));
      chunk = std::min(chunk, row.options->prefill_chunk);
    }
    const int64_t shared = shared_beginning(model.config(), texts);
    if (shared == 0 || longest - shared > chunk) return 0;
    std::vector<LiveRow> beginning(1, added[0]);
    beginning[0].text.resize(static_cast<size_t>(shared));
    (void)prefill(beginning, filled, {{0}});
    filled = filled.select_rows(std::vector<int64_t>(added.size(), 0));
    return shared;
  }

  // Every row in as many nearly even parts, so that no pass has more than a chunk of any row. `next`: of each row a 0
  // for its prompt, and the tokens guessed to come behind it, which the last pass reads as well.
  at::Tensor prefill(const std::vector<LiveRow>& added, KvCache& filled, const Rows& next) const {
    const int64_t shared = added.size() > 1 ? prefill_beginning(added, filled) : 0;
    const int64_t passes = shared > 0 ? 1 : passes_of(added);
    const auto full = mapped(added, [](const auto& row) { return std::ssize(row.text); });
    at::Tensor logits;
    for (int64_t p = 0; p < passes; ++p) {
      Rows parts;
      std::vector<int64_t> begins;
      for (const auto& row : added) {
        row.options->cancel.check("generation");
        const int64_t n = std::ssize(row.text) - shared;
        begins.push_back(shared + n * p / passes);
        auto& part =
            parts.emplace_back(row.text.begin() + begins.back(), row.text.begin() + shared + n * (p + 1) / passes);
        if (p + 1 < passes) continue;
        const auto& guessed = next[parts.size() - 1];
        part.insert(part.end(), guessed.begin() + 1, guessed.end());
      }
      TokenBatch batch = TokenBatch::continuing(parts, begins);
      batch.set_full_lengths(full);
      ForwardOptions pass{.cache = &filled, .logit_tokens = kNoTokens};
      if (p + 1 == passes)
        for (int64_t r = 0; r < batch.rows(); ++r)
          for (auto k = -static_cast<int64_t>(next[static_cast<size_t>(r)].size()); k < 0; ++k)
            pass.logit_tokens->push_back(batch.token(r, k));
      logits = run(batch, added, pass);
    }
    return logits;
  }

  // As prefill, with equal rows (several samples of a prompt) read once.
  at::Tensor prefill_once(const std::vector<LiveRow>& added, KvCache& filled, const Rows& next) const {
    std::map<std::tuple<int64_t, int64_t, std::vector<int64_t>>, int64_t> seen;
    std::vector<int64_t> of_row;
    std::vector<LiveRow> different;
    for (size_t i = 0; i < added.size(); ++i) {
      const auto [found, is_new] = seen.emplace(
          std::tuple(added[i].group, added[i].options->prefill_chunk, added[i].text), std::ssize(different));
      if (is_new) different.push_back(added[i]);
      of_row.push_back(found->second);
    }
    const bool guessed = std::ranges::any_of(next, [](const auto& tokens) { return tokens.size() > 1; });
    if (guessed || different.size() == added.size()) return prefill(added, filled, next);
    const at::Tensor logits = prefill(different, filled, Rows(different.size(), Rows::value_type{0}));
    filled = filled.select_rows(of_row);
    return logits.index_select(0, devices::index_on(of_row, logits));
  }

  void add_together(std::vector<LiveRow> added) {
    int64_t longest = 0, room = 0;
    for (const auto& row : added) {
      longest = std::max(longest, std::ssize(row.text));
      room = std::max(room, std::min<int64_t>(row.options->max_new_tokens, 256));
    }
    KvCache filled(model.n_layers(), longest + room);
    const Rows next = next_tokens(added, true);
    const at::Tensor logits = prefill_once(added, filled, next);
    choose_all(logits, added, next);
    forget_wrong_guesses(added, filled);
    drop_finished(0);
    cache.append_rows(std::move(filled));
    std::move(added.begin(), added.end(), std::back_inserter(rows));
  }

  // Each row's last token, and what its drafts say comes next, if worth a look. `fresh`: the pass that reads prompts.
  [[nodiscard]] Rows next_tokens(const std::vector<LiveRow>& of, bool fresh) const {
    std::vector<detail::Guess> guesses;
    int64_t anyway = 0;
    for (const auto& row : of) {
      anyway += fresh ? std::ssize(row.text) : 1;
      const int64_t room =
          std::min(row.options->max_new_tokens - row.chosen, longest_pass(model.config(), std::ssize(row.text), fresh));
      const bool guessed = !row.done && !row.drafts.empty() && row.plain();
      const detail::Record record{row.options->trust, row.wrong};
      guesses.push_back(guessed ? detail::guess_next(row.drafts, row.answer(), room - 1, record) : detail::Guess{});
      auto& tokens = guesses.back().tokens;  // up to one that another model's tokenizer made
      const auto known = [&](int64_t id) { return id >= 0 && id < model.vocab_size(); };
      tokens.erase(std::find_if_not(tokens.begin(), tokens.end(), known), tokens.end());
    }
    const int64_t limit = kLogitsAtOnce / model.vocab_size();
    const auto counts = detail::worth_checking(guesses, anyway, limit, model.placement().head.is_cpu());
    Rows next;
    for (size_t i = 0; i < of.size(); ++i) {
      auto& tokens = next.emplace_back(1, of[i].text.back());
      tokens.insert(tokens.end(), guesses[i].tokens.begin(), guesses[i].tokens.begin() + counts[i]);
    }
    return next;
  }

  // The cache holds all but the last token of each row.
  static void forget_wrong_guesses(const std::vector<LiveRow>& of, KvCache& filled) {
    filled.truncate(mapped(of, [](const auto& row) { return std::ssize(row.text) - 1; }));
  }

  // Once more than `share` of the rows are done, because taking rows out copies the cache; or one of them has come to
  // the end of the position table.
  void drop_finished(double share) {
    const bool table = model.config().positions == Positions::kLearned;
    std::vector<int64_t> kept;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (!rows[i].done) kept.push_back(static_cast<int64_t>(i));
      if (rows[i].done && table && std::ssize(rows[i].text) > model.max_positions()) share = 0;
    }
    if (static_cast<double>(rows.size() - kept.size()) <= share * static_cast<double>(rows.size())) return;
    cache = kept.empty() ? KvCache(model.n_layers()) : cache.select_rows(kept);
    std::erase_if(rows, [](const LiveRow& row) { return row.done; });
  }
};

RunningBatch::RunningBatch(const Model& model, BeforePass before_pass)
    : state_(new State{model, std::move(before_pass), {}, KvCache(model.n_layers())}) {}

RunningBatch::~RunningBatch() = default;

void RunningBatch::add(std::vector<BatchRow> rows) {
  std::vector<LiveRow> waiting;
  for (auto& row : rows) {
    check_row(state_->model, row);
    if (row.options->max_new_tokens > 0) waiting.emplace_back(std::move(row));
  }
  const at::NoGradGuard no_grad;
  // A prompt with fewer tokens than the longest one has passes cannot be split that often: it goes with the next group.
  // So do those for which a pass has no room.
  constexpr int64_t kTogether = 8192;  // tokens of a pass over several prompts
  while (!waiting.empty()) {
    const int64_t passes = passes_of(waiting);
    int64_t tokens = 0;
    std::vector<LiveRow> together, later;
    for (auto& row : waiting) {
      const int64_t more = std::ssize(row.text);
      const bool fits = more >= passes && (tokens == 0 || tokens + more <= kTogether * passes);
      if (fits) tokens += more;
      (fits ? together : later).push_back(std::move(row));
    }
    state_->add_together(std::move(together));
    waiting = std::move(later);
  }
}

void RunningBatch::step() {
  const at::NoGradGuard no_grad;
  state_->forget_wrong_guesses(state_->rows, state_->cache);  // what a step read that was broken off
  state_->drop_finished(0.25);
  if (active() == 0) return;
  for (const auto& row : state_->rows)
    if (!row.done) row.options->cancel.check("generation");
  const Rows next = state_->next_tokens(state_->rows, false);
  const auto batch = TokenBatch::continuing(next, state_->cache.lengths());
  choose_all(state_->run(batch, state_->rows, {.cache = &state_->cache}), state_->rows, next);
  state_->forget_wrong_guesses(state_->rows, state_->cache);
}

size_t RunningBatch::active() const noexcept {
  const auto& rows = state_->rows;
  return static_cast<size_t>(std::ranges::count_if(rows, [](const LiveRow& row) { return !row.done; }));
}

int64_t RunningBatch::cache_bytes() const {
  return state_->cache.bytes();
}

namespace {

void require_drafts(const Rows& prompts, const std::vector<Drafts>& drafts) {
  if (!drafts.empty() && drafts.size() != prompts.size())
    refuse({"generation", "drafts for " + std::to_string(drafts.size()) + " prompts",
            "one list for each of " + std::to_string(prompts.size()), "give a prompt without drafts an empty one"});
}

// Rows [begin, end) of the prompts, together.
void generate_group(const Model& model, const Rows& prompts, const GenerateOptions& options,
                    std::vector<Drafts>& drafts, size_t begin, size_t end, Rows& results) {
  GenerateOptions collecting = options;
  collecting.on_token = [&](int64_t row, int64_t id) {
    results[static_cast<size_t>(row)].push_back(id);
    if (options.on_token) options.on_token(row, id);
  };
  const auto shared = std::make_shared<const GenerateOptions>(std::move(collecting));
  std::vector<BatchRow> rows;
  for (size_t r = begin; r < end; ++r) {
    rows.push_back({prompts[r], shared, static_cast<int64_t>(r)});
    if (!drafts.empty()) rows.back().drafts = std::move(drafts[r]);
  }
  RunningBatch batch(model);
  batch.add(std::move(rows));
  while (batch.active() > 0) batch.step();
}

}  // namespace

void require_room(const Model& model, const std::vector<int64_t>& prompt, const std::string& where) {
  if (!model.config().rotary_depends_on_length() && std::ssize(prompt) > model.max_positions())
    refuse({where, "a prompt of " + counted(prompt.size(), "token"),
            "at most " + std::to_string(model.max_positions()) + ", as many as the model was made for", ""});
}

int64_t room_behind(const Model& model, int64_t prompt_tokens) {
  return model.config().positions == Positions::kLearned ? model.max_positions() + 1 - prompt_tokens
                                                         : std::numeric_limits<int64_t>::max();
}

Rows generate_together(const Model& model, const Rows& prompts, const GenerateOptions& options,
                       std::vector<Drafts> drafts) {
  require_drafts(prompts, drafts);
  Rows results(prompts.size());
  generate_group(model, prompts, options, drafts, 0, prompts.size(), results);
  return results;
}

Rows generate(const Model& model, const Rows& prompts, const GenerateOptions& options, std::vector<Drafts> drafts) {
  if (options.on_token || options.ends || options.on_logits || options.on_error)
    return generate_together(model, prompts, options, std::move(drafts));
  require_drafts(prompts, drafts);
  const size_t n = prompts.size(), groups = groups_of_rows(model, n);
  Rows results(n);
  side_by_side(model, static_cast<int64_t>(groups), [&](int64_t group) {
    const auto g = static_cast<size_t>(group);
    generate_group(model, prompts, options, drafts, n * g / groups, n * (g + 1) / groups, results);
  });
  return results;
}

}  // namespace emend::models
