// Causal tracing.
//
// Legend: S noise draws · T tokens of the prompt · L layers · D model width.
//
// A *cell* is one kind, token and layer of the heat map; a *row* is one cell under one draw, and holds the tokens from
// the restored one to the prompt's end. What lies before is read from the noised run's keys and values, which restoring
// a token cannot change; tokens before the subject are the same in both runs and have no cells. A *sweep* takes the
// rows of one token through the layers from below: a row joins where its cell's effect begins, so that no layer below
// is run again, and all cells share one batch above.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/evaluation/detail/scoring.h>
#include <emend/evaluation/detail/trace_parts.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <cmath>
#include <tuple>

namespace emend::evaluation {
namespace {

using hooks::Site;

constexpr int kDrawsARound = 2;

[[noreturn]] void refuse_numbers(const std::string& got) {
  throw Error(ErrorClass::kNumeric, {"causal tracing", got, "finite weights, and noise that their dtype can hold",
                                     "check the checkpoint (emend doctor), or take less " + setting("noise")});
}

/// Probabilities of the answer without the restored part: clean, and of every draw.
struct Unrestored {
  double clean;
  const std::vector<double>& noised;
};

struct Cell {
  TraceKind kind;
  int layer, low, high;          // restored in [low, high)
  std::vector<double> restored;  // probability of the answer in the first draws

  /// The layer from whose input on all of the row's tokens have to be run.
  [[nodiscard]] int joins() const { return low + 1; }
  /// The share of what the noise takes that it still takes: 1 where nothing is restored, 0 where everything is. The
  /// slope of restored over noised probabilities, through the clean one: where noise takes nothing, nothing comes back.
  [[nodiscard]] double lost(const Unrestored& without) const {
    double both = 0, own = 0;
    for (size_t i = 0; i < restored.size(); ++i) {
      const double noised = without.noised[i] - without.clean;
      both += (restored[i] - without.clean) * noised;
      own += noised * noised;
    }
    return own > 0 ? std::clamp(both / own, 0.0, 1.0) : 1;
  }
  /// The mean over all draws, told from these: where the noised runs differ between these and all, so does the restored
  /// one, as far as the noise still acts. Of all draws it is their plain mean.
  [[nodiscard]] double mean(const Unrestored& without, double corrupted) const {
    const auto n = static_cast<double>(restored.size());
    double own = 0, noised = 0;
    for (size_t i = 0; i < restored.size(); ++i) own += restored[i] / n, noised += without.noised[i] / n;
    return std::clamp(own + lost(without) * (corrupted - noised), 0.0, 1.0);
  }
  /// Whether that mean is known to `precision`. Two draws say so only where both restore nothing: a standard error of
  /// two is too often small by chance.
  [[nodiscard]] bool known(const Unrestored& without, double precision) const {
    const auto n = static_cast<double>(restored.size());
    if (n < 2) return false;
    const double share = n < 3 ? 1 : lost(without);
    double middle = 0, squares = 0, largest = 0;
    const auto rest = [&](size_t i) { return restored[i] - share * without.noised[i]; };
    for (size_t i = 0; i < restored.size(); ++i) middle += rest(i) / n, largest = std::max(largest, std::abs(rest(i)));
    if (n < 3) return largest <= precision;
    for (size_t i = 0; i < restored.size(); ++i) squares += (rest(i) - middle) * (rest(i) - middle);
    return squares / (n - 1) / n <= precision * precision;
  }
};

struct TraceRow {
  size_t cell;
  int64_t draw;
};

class FactTracer {
 public:
  FactTracer(const models::Model& model, const datasets::Fact& fact, const TraceOptions& options)
      : model_(model),
        options_(options),
        tokens_(detail::trace_tokens(model.tokenizer(), fact)),
        length_(std::ssize(tokens_.ids)),
        layers_(model.n_layers()) {
    if (!(options.noise > 0 && std::isfinite(options.noise)) || options.samples < 1 || options.window < 1)
      refuse({"causal tracing", "noise, samples or window not positive", "positive numbers", "see TraceOptions"});
    trace_.fact = fact;
    trace_.subject_begin = tokens_.subject_begin;
    trace_.subject_end = tokens_.subject_end;
    trace_.tokens = model.tokenizer().decode_each(tokens_.ids);
  }

  void run_clean();
  FactTrace run();
  [[nodiscard]] const FactTrace& trace() const { return trace_; }

 private:
  void run_noised();
  void run_noised(const at::Tensor& noise_SnD);
  void trace_token(int64_t token);
  void sweep(int64_t token, std::vector<Cell>& cells, const std::vector<TraceRow>& rows);
  [[nodiscard]] at::Tensor joining_states(int64_t token, int layer, const std::vector<Cell>& cells,
                                          const std::vector<TraceRow>& rows) const;
  [[nodiscard]] at::Tensor restored_outputs(TraceKind kind, int64_t token, int layer,
                                            const std::vector<int64_t>& draws) const;
  [[nodiscard]] at::Tensor run_layer(const models::TokenBatch& batch, int layer, at::Tensor hidden_ND, int64_t token,
                                     const std::vector<int64_t>& draws) const;

  [[nodiscard]] Unrestored unrestored() const { return {trace_.clean, noised_p_}; }

  const models::Model& model_;
  const TraceOptions& options_;
  detail::TraceTokens tokens_;
  int64_t length_;
  int layers_;
  FactTrace trace_;
  std::map<TraceKind, std::vector<at::Tensor>> clean_;  // [kind][layer] [T, D]
  std::vector<at::Tensor> noised_in_;                   // [layer] [S·T, D]; at L the output of the last
  std::vector<models::KvCache> noised_keys_;            // [layer], each with that layer alone
  std::vector<double> noised_p_;                        // [draw]
};

/// The clean run: the answer, its probability, and what can be put back.
void FactTracer::run_clean() {
  hooks::HookSession session(model_.hooks());
  for (int l = 0; l < layers_; ++l)
    for (Site site : {Site::kLayerOut, Site::kMlpOut, Site::kAttnOut}) session.capture({site, l});
  session.attach();
  const auto batch = models::TokenBatch::from_rows({tokens_.ids});
  models::ForwardOptions forward;
  forward.logit_tokens = {{batch.token(0, -1)}};
  const at::Tensor logits = model_.forward(batch, forward).needed_logits();
  for (int l = 0; l < layers_; ++l)
    for (TraceKind kind : {TraceKind::kState, TraceKind::kMlp, TraceKind::kAttention})
      clean_[kind].push_back(session.captured({detail::trace_site(kind), l}));
  session.finish();
  trace_.answer = devices::to_host(logits.argmax(-1), devices::Purpose::kHost).item<int64_t>();
  trace_.answer_text = model_.tokenizer().decode_more(std::vector{trace_.answer});
  trace_.clean = detail::answer_probabilities(logits, trace_.answer)[0];
}

/// The noised runs: inputs, keys and values of every layer, and the answer's probability.
void FactTracer::run_noised() {
  const at::Tensor noise_SnD =
      detail::trace_noise(options_, tokens_.subject_end - tokens_.subject_begin, model_.hidden_size());
  const int64_t most = std::max<int64_t>(1, options_.batch_tokens / length_);
  for (int64_t draw = 0; draw < options_.samples; draw += most) {
    options_.cancel.check("causal tracing");
    run_noised(noise_SnD.narrow(0, draw, std::min(most, options_.samples - draw)));
  }
  for (double p : noised_p_) trace_.corrupted += p / static_cast<double>(noised_p_.size());
}

/// The next draws, with this noise, in one batch.
void FactTracer::run_noised(const at::Tensor& noise_SnD) {
  const auto batch = models::TokenBatch::from_rows(
      std::vector<std::vector<int64_t>>(static_cast<size_t>(noise_SnD.size(0)), tokens_.ids));
  const auto last = batch.last_tokens();
  std::vector<int64_t> places;
  for (int64_t s = 0; s < noise_SnD.size(0); ++s)
    for (int64_t t = tokens_.subject_begin; t < tokens_.subject_end; ++t) places.push_back(batch.token(s, t));
  hooks::HookSession session(model_.hooks());
  session.edit({Site::kEmbedding, -1}, [&](const at::Tensor& x) {
    return x.index_add(
        0, devices::index_on(places, x),
        devices::route_like(noise_SnD.reshape({-1, x.size(1)}), x, devices::Purpose::kHidden, devices::Dtype::kMatch));
  });
  session.attach();
  models::ForwardOptions embed;
  embed.end_layer = 0;
  at::Tensor hidden = model_.forward(batch, embed).hidden, logits;
  session.finish();
  const bool first = noised_p_.empty();
  noised_in_.resize(static_cast<size_t>(layers_) + 1);
  const auto keep = [&](int layer) {
    at::Tensor& all = noised_in_[layer];
    all = first ? hidden : at::cat({all, hidden});
  };
  for (int l = 0; l < layers_; ++l) {
    keep(l);
    models::KvCache keys(layers_, length_);
    models::ForwardOptions forward;
    forward.first_layer = l;
    forward.end_layer = l + 1;
    forward.hidden = std::move(hidden);
    forward.cache = &keys;
    forward.logit_tokens = last;
    auto result = model_.forward(batch, forward);
    hidden = std::move(result.hidden);
    logits = result.logits;
    if (first) {
      noised_keys_.push_back(std::move(keys));
    } else {
      noised_keys_[l].append_rows(std::move(keys));
    }
  }
  keep(layers_);
  const auto p = detail::answer_probabilities(logits, trace_.answer);
  noised_p_.insert(noised_p_.end(), p.begin(), p.end());
}

FactTrace FactTracer::run() {
  run_noised();
  for (TraceKind kind : options_.kinds)
    trace_.restored[kind].assign(static_cast<size_t>(length_),
                                 std::vector<double>(static_cast<size_t>(layers_), trace_.corrupted));
  for (int64_t token = tokens_.subject_begin; token < length_; ++token) trace_token(token);
  trace_.draws /= static_cast<double>((length_ - tokens_.subject_begin) * layers_) *
                  static_cast<double>(std::max<size_t>(1, options_.kinds.size()));
  return std::move(trace_);
}

/// All kinds and layers at one token: draws are added until every cell is known well enough.
void FactTracer::trace_token(int64_t token) {
  std::vector<Cell> cells;
  for (TraceKind kind : options_.kinds)
    for (int layer = 0; layer < layers_; ++layer) {
      const auto [low, high] = detail::trace_layers(kind, layer, options_.window, layers_);
      cells.push_back({kind, layer, low, high, {}});
    }
  std::ranges::stable_sort(cells, [](const Cell& a, const Cell& b) { return a.low < b.low; });
  const int round = options_.precision > 0 ? kDrawsARound : options_.samples;
  const auto most = static_cast<size_t>(std::max<int64_t>(1, options_.batch_tokens / (length_ - token)));
  for (int draw = 0; draw < options_.samples; draw += round) {
    std::vector<TraceRow> rows;
    for (size_t c = 0; c < cells.size(); ++c) {
      if (draw > 0 && cells[c].known(unrestored(), options_.precision)) continue;
      for (int d = draw; d < std::min(options_.samples, draw + round); ++d) rows.push_back({c, d});
    }
    for (size_t begin = 0; begin < rows.size(); begin += most) {
      options_.cancel.check("causal tracing");
      sweep(token, cells, {rows.begin() + begin, rows.begin() + std::min(rows.size(), begin + most)});
    }
  }
  for (const auto& cell : cells) {
    trace_.draws += static_cast<double>(cell.restored.size());
    trace_.restored[cell.kind][token][cell.layer] = cell.mean(unrestored(), trace_.corrupted);
  }
}

/// Output of `layer` for rows that go on from `token` of these draws.
at::Tensor FactTracer::run_layer(const models::TokenBatch& batch, int layer, at::Tensor hidden_ND, int64_t token,
                                 const std::vector<int64_t>& draws) const {
  models::KvCache cache = noised_keys_[layer].select_rows(draws);
  cache.truncate(std::vector<int64_t>(draws.size(), token));
  models::ForwardOptions forward;
  forward.first_layer = layer;
  forward.end_layer = layer + 1;
  forward.hidden = std::move(hidden_ND);
  forward.cache = &cache;
  forward.append = false;
  forward.logit_tokens.emplace();
  return model_.forward(batch, forward).needed_hidden();
}

/// Output of `layer` at `token` where the MLP or the attention of that layer alone is restored, [rows, D].
at::Tensor FactTracer::restored_outputs(TraceKind kind, int64_t token, int layer,
                                        const std::vector<int64_t>& draws) const {
  const at::Tensor& clean = clean_.at(kind)[layer];
  hooks::HookSession session(model_.hooks());
  session.edit({detail::trace_site(kind), layer}, [&](const at::Tensor& x) {
    return devices::route_like(clean.narrow(0, token, 1), x, devices::Purpose::kHidden).expand_as(x).contiguous();
  });
  session.attach();
  const at::Tensor& in = noised_in_[layer];
  std::vector<int64_t> places;
  for (int64_t draw : draws) places.push_back(draw * length_ + token);
  auto batch = models::TokenBatch::continuing(std::vector<std::vector<int64_t>>(draws.size(), {tokens_.ids[token]}),
                                              std::vector<int64_t>(draws.size(), token));
  batch.set_full_lengths(std::vector<int64_t>(draws.size(), length_));
  at::Tensor out = run_layer(batch, layer, in.index_select(0, devices::index_on(places, in)), token, draws);
  session.finish();
  return out;
}

/// Inputs of `layer` of the rows that join there, [rows · (T - token), D]: the noised run's, and at the first token
/// what the restoration in the layer below left.
at::Tensor FactTracer::joining_states(int64_t token, int layer, const std::vector<Cell>& cells,
                                      const std::vector<TraceRow>& rows) const {
  const at::Tensor& noised = noised_in_[layer];
  const int64_t own = length_ - token;
  std::vector<int64_t> places;
  for (const TraceRow& row : rows)
    for (int64_t t = token; t < length_; ++t) places.push_back(row.draw * length_ + t);
  at::Tensor states = noised.index_select(0, devices::index_on(places, noised));
  for (TraceKind kind : options_.kinds) {
    std::vector<int64_t> firsts, draws;
    for (size_t r = 0; r < rows.size(); ++r)
      if (cells[rows[r].cell].kind == kind) {
        firsts.push_back(static_cast<int64_t>(r) * own);
        draws.push_back(rows[r].draw);
      }
    if (firsts.empty()) continue;
    at::Tensor values = kind == TraceKind::kState
                            ? clean_.at(kind)[layer - 1].narrow(0, token, 1).expand({std::ssize(firsts), -1})
                            : restored_outputs(kind, token, layer - 1, draws);
    states.index_copy_(0, devices::index_on(firsts, states),
                       devices::route_like(values.contiguous(), states, devices::Purpose::kHidden));
  }
  return states;
}

/// Runs rows of one token, ordered by where they join, and records their probabilities.
void FactTracer::sweep(int64_t token, std::vector<Cell>& cells, const std::vector<TraceRow>& rows) {
  const int64_t own = length_ - token;
  const std::vector<int64_t> ids(tokens_.ids.begin() + token, tokens_.ids.end());
  size_t active = 0;
  models::TokenBatch batch;
  std::vector<int64_t> draws, ends;
  at::Tensor hidden_ND, logits;
  for (int layer = cells[rows[0].cell].joins(); layer <= layers_; ++layer) {
    const size_t begin = active;
    while (active < rows.size() && cells[rows[active].cell].joins() == layer) ++active;
    const std::vector<TraceRow> joining(rows.begin() + begin, rows.begin() + active);
    if (!joining.empty()) {
      const at::Tensor more = joining_states(token, layer, cells, joining);
      for (size_t r = begin; r < active; ++r) {
        draws.push_back(rows[r].draw);
        ends.push_back(static_cast<int64_t>(r + 1) * own - 1);
      }
      hidden_ND = begin == 0 ? more : at::cat({devices::route_like(hidden_ND, more, devices::Purpose::kHidden), more});
      batch = models::TokenBatch::continuing(std::vector<std::vector<int64_t>>(active, ids),
                                             std::vector<int64_t>(active, token));
    }
    if (layer == layers_) break;
    hooks::HookSession session(model_.hooks());
    for (TraceKind kind : options_.kinds) {
      if (kind == TraceKind::kState) continue;
      std::vector<int64_t> firsts;
      for (size_t r = 0; r < active; ++r)
        if (const Cell& cell = cells[rows[r].cell]; cell.kind == kind && cell.high > layer)
          firsts.push_back(static_cast<int64_t>(r) * own);
      if (firsts.empty()) continue;
      session.edit(
          {detail::trace_site(kind), layer}, [&clean = clean_.at(kind)[layer], token, firsts](const at::Tensor& x) {
            const at::Tensor value = devices::route_like(clean.narrow(0, token, 1), x, devices::Purpose::kHidden)
                                         .expand({std::ssize(firsts), -1});
            return x.index_copy(0, devices::index_on(firsts, x), value);
          });
    }
    session.attach();
    hidden_ND = run_layer(batch, layer, std::move(hidden_ND), token, draws);
    session.finish();
  }
  const auto p = detail::answer_probabilities(
      model_.project(hidden_ND.index_select(0, devices::index_on(ends, hidden_ND))), trace_.answer);
  for (size_t r = 0; r < rows.size(); ++r) cells[rows[r].cell].restored.push_back(p[r]);
}

}  // namespace

std::string_view to_string(TraceKind kind) noexcept {
  return kind == TraceKind::kState ? "state" : kind == TraceKind::kMlp ? "mlp" : "attention";
}

double embedding_deviation(const models::Model& model, const std::vector<datasets::Fact>& facts) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> ids;
  for (const auto& fact : facts) {
    const auto own = model.tokenizer().encode_ids(fact.subject);
    ids.insert(ids.end(), own.begin(), own.end());
  }
  if (ids.empty())
    refuse(
        {"causal tracing", "no facts to measure the embeddings on", "known facts with subjects", "give a facts file"});
  const at::Tensor table = model.embedding();
  at::Tensor rows =
      table.index_select(0, devices::index_on(ids, table)).to(at::kFloat) * model.config().embedding_scale;
  for (const auto& tensor : model.weight_table())
    if (tensor.part == models::Part::kProjectIn && !tensor.bias)
      rows = rows.matmul(
          devices::route_like(model.weight(tensor.name), rows, devices::Purpose::kWeight, devices::Dtype::kMatch).t());
  const auto deviation = devices::to_host(rows.to(at::kDouble).std(), devices::Purpose::kHost).item<double>();
  if (!std::isfinite(deviation)) refuse_numbers("embeddings that are not finite");
  return deviation;
}

TraceSummary trace_facts(const models::Model& model, const std::vector<datasets::Fact>& facts,
                         const TraceOptions& given) {
  const at::NoGradGuard no_grad;
  TraceOptions options = given;
  if (options.noise <= 0) options.noise = options.noise_multiple * embedding_deviation(model, facts);
  TraceSummary summary;
  summary.noise = options.noise;
  summary.window = options.window;
  summary.samples = options.samples;
  summary.precision = options.precision;
  summary.n_layers = model.n_layers();
  const int64_t most = options.max_facts < 0 ? std::ssize(facts) : options.max_facts;
  for (const auto& fact : facts) {
    if (summary.facts == most) break;
    options.cancel.check("causal tracing");
    FactTracer tracer(model, fact, options);
    tracer.run_clean();
    if (!options.any_answer) {
      const auto expected = encode_request(model.tokenizer(), {fact.full_prompt(), fact.target_true.value_or("")});
      if (tracer.trace().answer != expected.ids[expected.begin]) {
        ++summary.skipped;
        continue;
      }
    }
    summary.traces.push_back(tracer.run());
    ++summary.facts;
    if (options.progress)
      options.progress({"trace", static_cast<double>(summary.facts),
                        static_cast<double>(std::min<int64_t>(most, std::ssize(facts))),
                        counted(static_cast<size_t>(summary.facts), "fact") + ", " + std::to_string(summary.skipped) +
                            " not known to the model"});
  }
  average(summary, options.kinds);
  return summary;
}

namespace detail {
using hooks::Site;

TraceTokens trace_tokens(const models::Tokenizer& tokenizer, const datasets::Fact& fact) {
  const std::string prompt = fact.full_prompt();
  const size_t begin = fact.prompt.find("{}");
  if (begin == std::string::npos)
    refuse({"causal tracing of \"" + prompt + "\"", "the subject \"" + fact.subject + "\" has no place in the prompt",
            "a prompt that contains its subject", "check the facts; with_slot() makes the place"});
  auto encoding = tokenizer.encode_prompt(prompt);
  TraceTokens tokens;
  std::tie(tokens.subject_begin, tokens.subject_end) = encoding.overlapping(begin, begin + fact.subject.size());
  tokens.ids = std::move(encoding.ids);
  if (tokens.subject_begin < 0)
    refuse({"causal tracing of \"" + prompt + "\"", "no token holds the subject", "a subject with tokens", ""});
  return tokens;
}

Site trace_site(TraceKind kind) {
  return kind == TraceKind::kMlp ? Site::kMlpOut : kind == TraceKind::kAttention ? Site::kAttnOut : Site::kLayerOut;
}

std::pair<int, int> trace_layers(TraceKind kind, int layer, int window, int n_layers) {
  if (kind == TraceKind::kState) return {layer, layer + 1};
  return {std::max(0, layer - window / 2), std::min(n_layers, layer + (window + 1) / 2)};
}

at::Tensor trace_noise(const TraceOptions& options, int64_t tokens, int64_t width) {
  auto generator = at::detail::createCPUGenerator(options.seed);
  return at::randn({options.samples, tokens, width}, generator, at::TensorOptions().dtype(at::kFloat)) * options.noise;
}

std::vector<double> answer_probabilities(const at::Tensor& logits_MV, int64_t answer) {
  const at::Tensor p = at::softmax(wide_logits(logits_MV), -1).select(1, answer);
  const at::Tensor host = devices::to_host(p, devices::Purpose::kHost).to(at::kDouble).contiguous();
  if (!at::isfinite(host).all().item<bool>()) refuse_numbers("logits that are not finite");
  return {host.const_data_ptr<double>(), host.const_data_ptr<double>() + host.numel()};
}
}  // namespace detail

}  // namespace emend::evaluation
