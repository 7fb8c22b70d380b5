#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/core/sha256.h>
#include <emend/datasets/corpus.h>
#include <emend/devices/route.h>
#include <emend/editors/shared_statistics.h>
#include <emend/editors/solver.h>
#include <emend/editors/statistics.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <random>
#include <set>

namespace emend::editors {
namespace {

constexpr int kCacheVersion = 1;
constexpr int64_t kTokensPerDimension = 10;
constexpr size_t kMaxTextBytes = size_t{64} << 20;
constexpr int64_t kSampledLength = 256, kSampledRows = 64, kSampledTopK = 40;

// Beginnings of sampled text, so that a model without BOS does not always start alike.
constexpr std::array kBeginnings = {"The",     "In",     "It",    "A",    "He",      "She",  "They", "We",
                                    "This",    "When",   "After", "For",  "As",      "On",   "At",   "From",
                                    "With",    "During", "There", "If",   "While",   "One",  "Many", "Since",
                                    "Because", "What",   "How",   "Most", "Another", "Some", "By",   "Before"};

std::string name_of(FirstToken first) {
  return first == FirstToken::kCount ? "count" : "skip";
}

int64_t wanted_tokens(const models::Model& model, const std::vector<int>& layers, const StatisticsOptions& options) {
  if (options.tokens > 0) return options.tokens;
  int64_t width = 0;
  for (const int layer : layers) width = std::max(width, model.edit_site(layer).in_features);
  return kTokensPerDimension * width;
}

int64_t row_limit(const models::Model& model, const StatisticsOptions& options) {
  return std::max<int64_t>(1, std::min(options.max_length, model.max_positions()));
}

// Fisher-Yates with a fixed generator: std::shuffle differs between standard libraries.
template <class T>
void shuffle(std::vector<T>& items, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random() % i]);
}

// Rows of ids from the text's documents, until there are enough tokens. `counted` leaves out skipped first tokens.
std::vector<std::vector<int64_t>> rows_of_text(const models::Model& model, const StatisticsText& text, int64_t tokens,
                                               const StatisticsOptions& options) {
  std::vector<std::string> documents;
  size_t bytes = 0;
  text.each([&](const std::string& document) {
    bytes += document.size();
    documents.push_back(document);
    return bytes < kMaxTextBytes;
  });
  shuffle(documents, options.seed);
  const auto limit = static_cast<size_t>(row_limit(model, options));
  const int64_t skipped = options.first_token == FirstToken::kSkip ? 1 : 0;
  std::vector<std::vector<int64_t>> rows;
  int64_t counted = 0;
  for (const auto& document : documents) {
    options.cancel.check("statistics");
    // A token is at most a few dozen bytes; a whole book need not be encoded for its first words.
    std::string_view head = document;
    if (head.size() > limit * 64) {
      size_t end = limit * 64;
      while (end > 0 && (static_cast<unsigned char>(head[end]) & 0xC0) == 0x80) --end;
      head = head.substr(0, end);
    }
    auto ids = model.tokenizer().encode_ids(head, true);
    if (ids.size() > limit) ids.resize(limit);
    const int64_t count = static_cast<int64_t>(ids.size()) - skipped;
    if (count <= 0) continue;
    counted += count;
    rows.push_back(std::move(ids));
    if (counted >= tokens) break;
  }
  if (rows.empty())
    throw Error(ErrorClass::kInvalidArgument, {text.name, "no tokens", "text", "give another --corpus"});
  return rows;
}

// Rows that the model writes itself.
std::vector<std::vector<int64_t>> sampled_rows(const models::Model& model, int64_t tokens,
                                               const StatisticsOptions& options) {
  const auto& tokenizer = model.tokenizer();
  const int64_t length = std::min(kSampledLength, row_limit(model, options));
  const int64_t most_rows = 4 * std::max<int64_t>(1, (tokens + length - 1) / length);
  std::vector<std::vector<int64_t>> rows;
  int64_t counted = 0;
  // A text may end early, so the number of rows is known only when enough tokens are there.
  for (int64_t begin = 0; counted < tokens && begin < most_rows; begin += kSampledRows) {
    const int64_t n_rows = std::min(begin + kSampledRows, begin + (tokens - counted + length - 1) / length);
    options.cancel.check("statistics");
    std::vector<std::vector<int64_t>> prompts;
    for (int64_t r = begin; r < n_rows; ++r) {
      prompts.push_back(tokenizer.encode_ids(kBeginnings[static_cast<size_t>(r) % kBeginnings.size()], true));
      if (options.seed && prompts.back().empty()) prompts.back().push_back(tokenizer.bos_id().value_or(0));
    }
    models::GenerateOptions generate;
    generate.temperature = 1;
    generate.top_k = kSampledTopK;
    generate.seed = options.seed * 1000003 + static_cast<uint64_t>(begin);
    generate.stop_ids = tokenizer.eos_ids();
    generate.max_new_tokens = std::max<int64_t>(1, length - 2);
    generate.cancel = options.cancel;
    auto continued = models::generate(model, prompts, generate);
    for (size_t r = 0; r < prompts.size(); ++r) {
      auto row = prompts[r];
      row.insert(row.end(), continued[r].begin(), continued[r].end());
      if (static_cast<int64_t>(row.size()) > row_limit(model, options))
        row.resize(static_cast<size_t>(row_limit(model, options)));
      counted += static_cast<int64_t>(row.size());
      rows.push_back(std::move(row));
    }
    if (options.progress)
      options.progress(
          {"sampling text", static_cast<double>(std::min(counted, tokens)), static_cast<double>(tokens), ""});
  }
  return rows;
}

// Packed indices of the tokens that count.
at::Tensor counted_tokens(const models::TokenBatch& batch) {
  std::vector<int64_t> tokens;
  for (int64_t r = 0; r < batch.rows(); ++r)
    for (int64_t k = 1; k < batch.length(r); ++k) tokens.push_back(batch.token(r, k));
  return at::tensor(tokens, at::kLong);
}

}  // namespace

StatisticsText StatisticsText::from_file(const std::filesystem::path& path) {
  StatisticsText text;
  text.fingerprint = datasets::corpus_hash(path);
  text.name = path.filename().string();
  text.each = [path](const std::function<bool(const std::string&)>& sink) {
    datasets::CorpusReader reader(path);
    while (const auto document = reader.next())
      if (!sink(document->text)) return;
  };
  return text;
}

namespace {

// Batch b belongs to process b mod size, so that every batch is the one of a single process.
std::map<int, SecondMoment> collect(const models::Model& model, const std::vector<std::vector<int64_t>>& rows,
                                    const std::vector<int>& layers, const StatisticsOptions& options,
                                    devices::Collectives* group) {
  const at::NoGradGuard no_grad;
  EMEND_CHECK(!layers.empty(), "statistics of no layer");
  const bool skip = options.first_token == FirstToken::kSkip;
  std::vector<const std::vector<int64_t>*> order;
  int64_t total = 0;
  for (const auto& row : rows) {
    if (row.size() <= (skip ? 1U : 0U)) continue;
    order.push_back(&row);
    total += static_cast<int64_t>(row.size());
  }
  if (order.empty())
    throw Error(ErrorClass::kInvalidArgument, {"statistics", "no tokens", "rows of tokens", "give another corpus"});
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->size() > b->size(); });

  std::map<int, at::Tensor> sums_FF;
  int64_t count = 0, seen = 0, number = 0;
  at::Tensor counted;  // of the batch at hand; undefined: all
  const int last = *std::max_element(layers.begin(), layers.end());
  hooks::HookSession session(model.hooks());
  for (const int layer : std::set<int>(layers.begin(), layers.end())) {
    session.edit({hooks::Site::kMlpDownIn, layer}, [&sums_FF, &counted, layer](const at::Tensor& x) {
      at::Tensor keys_NF = x;
      if (counted.defined())
        keys_NF = keys_NF.index_select(0, devices::route_like(counted, x, devices::Purpose::kInput));
      if (keys_NF.scalar_type() != at::kDouble) keys_NF = keys_NF.to(at::kFloat);
      at::Tensor& sum_FF = sums_FF[layer];
      if (!sum_FF.defined()) sum_FF = at::zeros({x.size(1), x.size(1)}, x.options().dtype(at::kDouble));
      sum_FF.add_(keys_NF.t().mm(keys_NF));
      return at::Tensor();
    });
  }
  session.stop_after({hooks::Site::kMlpDownIn, last}).attach();
  models::ForwardOptions no_logits;
  no_logits.logit_tokens = std::vector<int64_t>{};
  for (size_t begin = 0; begin < order.size();) {
    options.cancel.check("statistics");
    std::vector<std::vector<int64_t>> batch_rows;
    int64_t tokens = 0;
    while (begin < order.size() &&
           (batch_rows.empty() || tokens + static_cast<int64_t>(order[begin]->size()) <= options.batch_tokens)) {
      batch_rows.push_back(*order[begin]);
      tokens += static_cast<int64_t>(order[begin++]->size());
    }
    if (group && number++ % group->size() != group->rank()) {
      seen += tokens;
      continue;
    }
    const auto batch = models::TokenBatch::from_rows(batch_rows);
    if (skip) counted = counted_tokens(batch);
    (void)model.forward(batch, no_logits);
    count += tokens - (skip ? batch.rows() : 0);
    seen += tokens;
    if (options.progress)
      options.progress(
          {"statistics", static_cast<double>(seen), static_cast<double>(total), std::to_string(seen) + " tokens"});
  }
  if (sums_FF.empty()) {  // more processes than batches
    session.detach();
    for (const int layer : layers) {
      const int64_t width = model.edit_site(layer).in_features;
      sums_FF[layer] = at::zeros({width, width}, at::kDouble);
    }
  } else {
    session.finish();
  }
  if (group) {
    at::Tensor counts = at::tensor({count}, at::kLong);
    group->all_reduce_sum(counts);
    count = counts.item<int64_t>();
    for (auto& [layer, sum_FF] : sums_FF) group->all_reduce_sum(sum_FF);
  }

  std::map<int, SecondMoment> moments;
  for (auto& [layer, sum_FF] : sums_FF) {
    at::Tensor cov_FF = devices::to_host(sum_FF, devices::Purpose::kStatistics) / static_cast<double>(count);
    cov_FF = ((cov_FF + cov_FF.t()) / 2).to(options.dtype);
    nlohmann::json origin = {{"tokens", count},
                             {"documents", order.size()},
                             {"first_token", name_of(options.first_token)},
                             {"max_length", options.max_length},
                             {"layer", layer}};
    moments.emplace(layer, SecondMoment(cov_FF, count, std::move(origin)));
  }
  return moments;
}

}  // namespace

std::map<int, SecondMoment> collect_second_moments(const models::Model& model,
                                                   const std::vector<std::vector<int64_t>>& rows,
                                                   const std::vector<int>& layers, const StatisticsOptions& options) {
  return collect(model, rows, layers, options, nullptr);
}

void FixedStatistics::prepare(const models::Model& model, const std::vector<int>& layers) {
  for (const int layer : layers) {
    const auto found = moments_.find(layer);
    const int64_t width = model.edit_site(layer).in_features;
    if (found != moments_.end() && found->second.width() == width) continue;
    throw Error(ErrorClass::kInvalidArgument,
                {"statistics of layer " + std::to_string(layer),
                 found == moments_.end() ? "none" : "width " + std::to_string(found->second.width()),
                 "a second moment of width " + std::to_string(width), "use statistics of this model"});
  }
}

const SecondMoment& FixedStatistics::get(int layer) const {
  const auto found = moments_.find(layer);
  if (found == moments_.end())
    throw Error(ErrorClass::kInvalidArgument, {"statistics", "layer " + std::to_string(layer) + " has none",
                                               "a prepared layer", "call prepare first"});
  return found->second;
}

nlohmann::json FixedStatistics::describe() const {
  return {{"source", "given"}, {"layers", moments_.size()}};
}

namespace {

struct CorpusState {
  std::optional<StatisticsText> text;
  StatisticsOptions options;
  std::map<int, SecondMoment> moments;
  std::vector<int> from_cache, computed;
  double seconds = 0;
  int64_t tokens = 0;

  [[nodiscard]] std::string source() const { return text ? text->name : "sampled from the model"; }

  // Everything that the numbers of a layer depend on.
  [[nodiscard]] std::string key(const models::Model& model, const std::string& weights, int layer,
                                int64_t wanted) const {
    nlohmann::json parts = {{"version", kCacheVersion},
                            {"weights", weights},
                            {"model_dtype", c10::toString(model.dtype())},
                            {"tokenizer", model.tokenizer().fingerprint()},
                            {"text", text ? text->fingerprint : "sampled"},
                            {"seed", options.seed},
                            {"tokens", wanted},
                            {"max_length", row_limit(model, options)},
                            {"first_token", name_of(options.first_token)},
                            {"dtype", c10::toString(options.dtype)},
                            {"site", hooks::to_string({hooks::Site::kMlpDownIn, layer})}};
    if (!text) parts["sampling"] = {"until enough", kSampledLength, kSampledRows, kSampledTopK, kBeginnings.size()};
    return sha256_hex(parts.dump());
  }

  std::optional<SecondMoment> cached(int layer, const std::string& cache_key) const {
    const auto path = options.cache / (cache_key + ".safetensors");
    try {
      auto moment = load_second_moment(path, cache_key);
      if (moment)
        options.log.info("statistics.cache", "statistics of layer " + std::to_string(layer) + " from " + path.string());
      return moment;
    } catch (const Error& error) {
      if (error.error_class() != ErrorClass::kCorruption && error.error_class() != ErrorClass::kUnsupported) throw;
      options.log.warning("statistics.damaged", std::string(error.what()) + "; computing it again");
      return std::nullopt;
    }
  }
};

// Layers that any process lacks: all compute them.
std::vector<int> missing_anywhere(const std::vector<int>& missing, devices::Collectives& group) {
  std::set<int> all;
  for (const auto& text : group.all_gather(nlohmann::json(missing).dump()))
    for (const int layer : nlohmann::json::parse(text).get<std::vector<int>>()) all.insert(layer);
  return {all.begin(), all.end()};
}

// Into the cache, which then gives up what was not used for long.
void store(const StatisticsOptions& options, const std::string& key, const SecondMoment& moment) {
  const auto path = options.cache / (key + ".safetensors");
  save_second_moment(path, moment, key);
  for (const auto& removed : prune_cache(options.cache, cache_limit(), path))
    options.log.info("statistics.pruned", "removed " + removed.path.string() + " to keep the cache within its bound");
}

nlohmann::json describe_corpus(const CorpusState& state);

void prepare_corpus(CorpusState& state, const models::Model& model, const std::vector<int>& layers,
                    devices::Collectives* group) {
  const auto start = std::chrono::steady_clock::now();
  const StatisticsOptions& options = state.options;
  std::vector<int> missing;
  for (const int layer : layers)
    if (!state.moments.contains(layer)) missing.push_back(layer);
  if (missing.empty()) return;

  state.tokens = wanted_tokens(model, layers, options);
  std::map<int, std::string> keys;
  if (!options.cache.empty()) {
    std::filesystem::create_directories(options.cache);
    const std::string weights = model.current_fingerprint();
    for (const int layer : missing) {
      keys[layer] = state.key(model, weights, layer, state.tokens);
      if (auto moment = state.cached(layer, keys[layer])) {
        state.moments.emplace(layer, *moment);
        state.from_cache.push_back(layer);
      }
    }
    std::erase_if(missing, [&](int layer) { return state.moments.contains(layer); });
  }
  if (group) {
    missing = missing_anywhere(missing, *group);
    for (const int layer : missing) {
      state.moments.erase(layer);
      std::erase(state.from_cache, layer);
    }
  }
  if (!missing.empty()) {
    const auto rows = state.text ? rows_of_text(model, *state.text, state.tokens, options)
                                 : sampled_rows(model, state.tokens, options);
    for (auto& [layer, moment] : collect(model, rows, missing, options, group)) {
      nlohmann::json origin = moment.origin();
      origin["text"] = state.source();
      SecondMoment named(moment.cov_FF(), moment.count(), origin);
      if (named.count() < named.width())
        options.log.warning("statistics.few_tokens",
                            "only " + std::to_string(named.count()) + " tokens for keys of width " +
                                std::to_string(named.width()) +
                                ": the second moment is singular; ten tokens a dimension are wanted");
      if (!options.cache.empty() && (!group || group->rank() == 0))
        store(options, keys[layer], named);
      state.moments.emplace(layer, named);
      state.computed.push_back(layer);
    }
    if (group) group->barrier();  // the cache is written when any process goes on
  }
  state.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  options.log.event(LogLevel::kInfo, "statistics.ready", "statistics ready: " + state.source(), describe_corpus(state));
}

const SecondMoment& prepared_moment(const CorpusState& state, int layer) {
  const auto found = state.moments.find(layer);
  if (found == state.moments.end())
    throw Error(ErrorClass::kInvalidArgument, {"statistics", "layer " + std::to_string(layer) + " was not prepared",
                                               "a prepared layer", "call prepare first"});
  return found->second;
}

nlohmann::json describe_corpus(const CorpusState& state) {
  nlohmann::json json = {{"source", state.source()},
                         {"tokens_wanted", state.tokens},
                         {"first_token", name_of(state.options.first_token)},
                         {"max_length", state.options.max_length},
                         {"dtype", c10::toString(state.options.dtype)},
                         {"seed", state.options.seed},
                         {"layers_from_cache", state.from_cache},
                         {"layers_computed", state.computed},
                         {"seconds", state.seconds}};
  if (state.text) json["text_sha256"] = state.text->fingerprint;
  if (!state.moments.empty()) json["tokens"] = state.moments.begin()->second.count();
  return json;
}

class SharedStatistics final : public StatisticsProvider {
 public:
  SharedStatistics(std::optional<StatisticsText> text, StatisticsOptions options, devices::Collectives& group)
      : group_(&group) {
    state_.text = std::move(text);
    state_.options = std::move(options);
  }
  void prepare(const models::Model& model, const std::vector<int>& layers) override {
    prepare_corpus(state_, model, layers, group_);
  }
  [[nodiscard]] const SecondMoment& get(int layer) const override { return prepared_moment(state_, layer); }
  [[nodiscard]] nlohmann::json describe() const override {
    auto json = describe_corpus(state_);
    json["processes"] = group_->size();
    return json;
  }

 private:
  CorpusState state_;
  devices::Collectives* group_;
};

}  // namespace

struct CorpusStatistics::State : CorpusState {};

CorpusStatistics::CorpusStatistics(std::optional<StatisticsText> text, StatisticsOptions options)
    : state_(std::make_unique<State>()) {
  state_->text = std::move(text);
  state_->options = std::move(options);
}

CorpusStatistics::~CorpusStatistics() = default;

void CorpusStatistics::prepare(const models::Model& model, const std::vector<int>& layers) {
  prepare_corpus(*state_, model, layers, nullptr);
}

const SecondMoment& CorpusStatistics::get(int layer) const {
  return prepared_moment(*state_, layer);
}

nlohmann::json CorpusStatistics::describe() const {
  return describe_corpus(*state_);
}

std::unique_ptr<StatisticsProvider> make_shared_statistics(std::optional<StatisticsText> text,
                                                           StatisticsOptions options, devices::Collectives& group) {
  return std::make_unique<SharedStatistics>(std::move(text), std::move(options), group);
}

}  // namespace emend::editors
