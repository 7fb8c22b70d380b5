#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/cache_folder.h>
#include <emend/core/sha256.h>
#include <emend/datasets/corpus.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/detail/statistics_parts.h>
#include <emend/editors/steps/solver.h>
#include <emend/editors/steps/statistics.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <set>

namespace emend::editors {
namespace {

constexpr int kCacheVersion = 2;
constexpr int64_t kTokensPerDimension = 10;
constexpr int64_t kFirstAsked = 8, kMostPerDimension = 128;  // tokens a dimension, for kAutoTokens
// Two halves are kept apart, and compared, if they are this narrow or the rule needs them: they take twice the memory.
constexpr int64_t kHalvesUpTo = 8192;
constexpr int64_t kChunkTokens = 65536;  // between two chances to save what has been summed

int64_t widest(const models::Model& model, const std::vector<int>& layers) {
  int64_t width = 0;
  for (const int layer : layers) width = std::max(width, model.edit_site(layer).in_features);
  return width;
}

int64_t wanted_tokens(const models::Model& model, const std::vector<int>& layers, const StatisticsOptions& options) {
  if (options.tokens == kAutoTokens) return kMostPerDimension * widest(model, layers);
  return options.tokens > 0 ? options.tokens : kTokensPerDimension * widest(model, layers);
}

}  // namespace

StatisticsText StatisticsText::from_file(const std::filesystem::path& path) {
  StatisticsText text;
  text.fingerprint = datasets::corpus_hash(path);
  text.name = path.filename().string();
  text.each = [path](const std::function<bool(const std::string&)>& sink) {
    datasets::read_corpus(path, [&](const datasets::Document& document) { return sink(document.text); });
  };
  return text;
}

std::map<int, SecondMoment> collect_second_moments(const models::Model& model,
                                                   const std::vector<std::vector<int64_t>>& rows,
                                                   const std::vector<int>& layers, const StatisticsOptions& options) {
  if (layers.empty()) refuse({"statistics", "no layer", "at least one", ""});
  const int64_t total = detail::tokens_of(rows);
  std::vector<detail::Sums> sums(1);
  int64_t done = 0;
  detail::add_rows(model, rows, layers, options, nullptr, sums, [&](int64_t tokens) {
    done += tokens;
    if (options.progress)
      options.progress(
          {"statistics", static_cast<double>(done), static_cast<double>(total), std::to_string(done) + " tokens"});
  });
  return detail::moments_of({detail::total_of(model, sums[0], layers, nullptr)}, options);
}

struct detail::CorpusState {
  std::optional<StatisticsText> text;
  StatisticsOptions options;
  devices::Collectives* group = nullptr;
  std::map<int, SecondMoment> moments;
  std::vector<int> from_cache, computed;
  double seconds = 0;
  int64_t tokens = 0;

  [[nodiscard]] std::string source() const { return text ? text->name : "sampled from the model"; }
  [[nodiscard]] bool remembers(const models::Model& model) const {
    return !options.cache.empty() && !model.has_attachments();
  }

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
                            {"max_length", detail::row_limit(model, options)},
                            {"first_token", detail::name_of(options.first_token)},
                            {"dtype", c10::toString(options.dtype)},
                            {"site", hooks::to_string({hooks::Site::kMlpDownIn, layer})}};
    if (devices::tf32_products()) parts["products"] = "tf32";
    if (options.tokens == kAutoTokens) parts["convergence"] = options.convergence;
    if (!text) parts["sampling"] = detail::sampling_rule(model);
    return sha256_hex(parts.dump());
  }

  // Nothing where a file of the cache is damaged or cannot be read, which the log is told.
  template <class Read>
  auto unless_damaged(const Read& read) const -> decltype(read()) {
    try {
      return read();
    } catch (const Error& error) {
      using enum ErrorClass;
      if (const auto kind = error.error_class(); kind != kCorruption && kind != kUnsupported && kind != kIo) throw;
      options.log.warning("statistics.damaged", std::string(error.what()) + "; computing it again");
      return std::nullopt;
    }
  }
  [[nodiscard]] std::filesystem::path path_of(const std::string& cache_key) const {
    return options.cache / (cache_key + ".safetensors");
  }
  std::optional<SecondMoment> cached(int layer, const std::string& cache_key) const {
    const auto path = path_of(cache_key);
    auto moment = unless_damaged([&] { return load_second_moment(path, cache_key); });
    if (moment)
      options.log.info("statistics.cache", "statistics of layer " + std::to_string(layer) + " from " + path.string());
    return moment;
  }

  // Into the cache, which then gives up what was not used for long.
  void keep(const std::string& cache_key, const std::function<void(const std::filesystem::path&)>& write) const {
    const auto in_folder = [&] {
      const auto path = path_of(cache_key);
      std::filesystem::create_directories(options.cache);
      write(path);
      for (const auto& removed : prune_cache(options.cache, cache_limit(), path))
        options.log.info("statistics.pruned",
                         "removed " + removed.path.string() + " to keep the cache within its bound");
    };
    if (options.cache_is_output) return in_folder();
    keep_if_possible(options.log, "statistics.cache", in_folder);
  }
  // The factor's file stands beside the moment's.
  void keep_factor(const std::string& cache_key, const SecondMoment& moment) const {
    const std::string factor_key = sha256_hex(cache_key + " factor");
    moment.keep_factor_at(path_of(factor_key), factor_key);
  }
};

namespace {

using detail::CorpusState;

// Layers that any process lacks: all compute them.
std::vector<int> missing_anywhere(const std::vector<int>& missing, devices::Collectives& group) {
  std::set<int> all;
  for (const auto& text : group.all_gather(nlohmann::json(missing).dump()))
    for (const int layer : nlohmann::json::parse(text).get<std::vector<int>>()) all.insert(layer);
  return {all.begin(), all.end()};
}

// Whether there was something to say of a moment, computed now or long ago.
bool warn_of_quality(const CorpusState& state, const SecondMoment& moment) {
  const std::string count = std::to_string(moment.count());
  const auto warn = [&](const std::string& name, const std::string& text) {
    state.options.log.warning(name, text);
    return true;
  };
  if (moment.count() < moment.width())
    return warn("statistics.few_tokens", "only " + count + " tokens for keys of width " +
                                             std::to_string(moment.width()) +
                                             ": the second moment is singular; ten tokens a dimension are wanted");
  const auto report = moment.origin().find("convergence");
  if (report != moment.origin().end() && report->contains("limit")) {
    const auto& disagreement = report->at("checks").back().at("disagreement");
    return (!disagreement.is_number() || disagreement > report->at("limit")) &&
           warn("statistics.unsettled",
                "the halves of " + count + " tokens still disagree by more than the limit: take a larger corpus");
  }
  return moment.count() < state.tokens &&
         warn("statistics.short_text", "the text has " + count + " of the " + std::to_string(state.tokens) +
                                           " tokens that are wanted: take a larger corpus, or ask for fewer");
}

// Reads the text until there is enough of it, in chunks; what has been summed is saved now and then, and an interrupted
// collection with the same settings goes on from there.
class Collection {
 public:
  // `keys`: of the cache files, a layer each; empty without a cache.
  Collection(const CorpusState& state, const models::Model& model, std::vector<int> layers,
             const std::map<int, std::string>& keys)
      : state_(state),
        options_(state.options),
        model_(model),
        layers_(std::move(layers)),
        automatic_(options_.tokens == kAutoTokens),
        source_(detail::make_row_source(model, state.text, options_)) {
    const bool apart = automatic_ || widest(model, layers_) <= kHalvesUpTo;
    halves_.resize(apart ? 2 : 1);
    if (keys.empty() || state_.group) return;
    std::string all;
    for (const int layer : layers_) all += keys.at(layer);
    partial_key_ = sha256_hex(all + " partial");
  }

  std::map<int, SecondMoment> run() {
    resume();
    const int64_t most = state_.tokens;
    int64_t goal = automatic_ ? std::min(most, kFirstAsked * widest(model_, layers_)) : most;
    for (;;) {
      read(goal);
      std::vector<detail::Sums> totals;
      for (const auto& half : halves_) totals.push_back(detail::total_of(model_, half, layers_, state_.group));
      if (totals.size() == 2) checks_.push_back(detail::compare(totals));
      const bool enough = !automatic_ || settled() || goal >= most || source_->exhausted();
      if (enough) return finish(totals);
      goal = std::min(most, 2 * goal);
    }
  }

 private:
  void read(int64_t goal) {
    while (read_ < goal && !source_->exhausted()) {
      const auto rows = source_->take(std::min(goal - read_, kChunkTokens));
      if (rows.empty()) break;
      const int64_t before = read_;
      detail::add_rows(model_, rows, layers_, options_, state_.group, halves_, [&](int64_t tokens) {
        read_ += tokens;
        if (options_.progress)
          options_.progress({"statistics", static_cast<double>(std::min(read_, goal)), static_cast<double>(goal),
                             std::to_string(read_) + " tokens"});
      });
      rows_ += static_cast<int64_t>(rows.size());
      if (read_ == before) break;
      if (std::chrono::steady_clock::now() - saved_ >= options_.save_every && read_ < state_.tokens) save();
    }
  }

  // The last check of every layer says that the halves agree.
  [[nodiscard]] bool settled() const {
    if (checks_.empty() || checks_.back().empty()) return false;
    return std::all_of(checks_.back().begin(), checks_.back().end(),
                       [&](const auto& layer) { return layer.second.disagreement <= options_.convergence; });
  }

  std::map<int, SecondMoment> finish(const std::vector<detail::Sums>& totals) {
    auto moments = detail::moments_of(totals, options_, [&](int layer, nlohmann::json& origin) {
      origin["text"] = state_.source();
      if (checks_.empty()) return;
      auto& report = origin["convergence"] = {{"rule", automatic_ ? "halves agree" : "fixed"}};
      if (automatic_) report["limit"] = options_.convergence;
      for (const auto& check : checks_)
        if (const auto found = check.find(layer); found != check.end())
          report["checks"].push_back(found->second.to_json());
    });
    std::error_code none;
    if (!partial_key_.empty()) std::filesystem::remove(state_.path_of(partial_key_), none);
    return moments;
  }

  void save() {
    saved_ = std::chrono::steady_clock::now();
    if (partial_key_.empty()) return;
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    nlohmann::json state = {{"rows", rows_}, {"read", read_}, {"halves", nlohmann::json::array()}};
    for (size_t half = 0; half < halves_.size(); ++half) {
      state["halves"].push_back({halves_[half].count, halves_[half].documents});
      for (const auto& [layer, sum_FF] : halves_[half].sums_FF)
        tensors.emplace_back(std::to_string(half) + "." + std::to_string(layer),
                             devices::to_host(sum_FF, devices::Purpose::kStatistics).contiguous());
    }
    state_.keep(partial_key_, [&](const std::filesystem::path& path) {
      write_checked(path, tensors,
                    {{"format", "emend partial statistics 1"}, {"key", partial_key_}, {"state", state.dump()}});
    });
  }

  void resume() {
    if (partial_key_.empty()) return;
    try {
      const auto file = open_cached(state_.path_of(partial_key_));
      if (!file || file->metadata().at("key") != partial_key_) return;
      const auto state = nlohmann::json::parse(file->metadata().at("state"));
      std::vector<detail::Sums> halves(halves_.size());
      for (size_t half = 0; half < halves.size(); ++half) {
        halves[half].count = state.at("halves").at(half).at(0);
        halves[half].documents = state.at("halves").at(half).at(1);
        for (const int layer : layers_) {
          const at::Tensor sum_FF = file->tensor(std::to_string(half) + "." + std::to_string(layer)).clone();
          halves[half].sums_FF[layer] = devices::route_to(
              sum_FF, model_.placement().layers.at(static_cast<size_t>(layer)), devices::Purpose::kStatistics);
        }
      }
      rows_ = state.at("rows");
      read_ = state.at("read");
      halves_ = std::move(halves);
      source_->skip(rows_);
      options_.log.info("statistics.resumed", "going on after " + std::to_string(read_) + " tokens");
    } catch (const Error& error) {
      if (error.error_class() == ErrorClass::kCancelled) throw;
      options_.log.warning("statistics.damaged", std::string(error.what()) + "; beginning again");
    } catch (const std::exception&) {  // metadata of another version
    }
  }

  const CorpusState& state_;
  const StatisticsOptions& options_;
  const models::Model& model_;
  std::vector<int> layers_;
  bool automatic_;
  std::unique_ptr<detail::RowSource> source_;
  std::vector<detail::Sums> halves_;
  std::vector<std::map<int, HalvesReport>> checks_;
  std::string partial_key_;  // empty: nothing is saved
  int64_t rows_ = 0, read_ = 0;
  std::chrono::steady_clock::time_point saved_ = std::chrono::steady_clock::now();
};

}  // namespace

CorpusStatistics::CorpusStatistics(std::optional<StatisticsText> text, StatisticsOptions options,
                                   devices::Collectives* group)
    : state_(std::make_unique<CorpusState>()) {
  state_->text = std::move(text);
  state_->options = std::move(options);
  state_->group = group;
}

CorpusStatistics::~CorpusStatistics() = default;

void CorpusStatistics::prepare(const models::Model& model, const std::vector<int>& layers) {
  CorpusState& state = *state_;
  const auto start = std::chrono::steady_clock::now();
  const StatisticsOptions& options = state.options;
  devices::Collectives* const group = state.group;
  std::vector<int> missing;
  for (const int layer : layers)
    if (!state.moments.contains(layer)) missing.push_back(layer);
  if (missing.empty()) return;

  const auto asked = missing;
  state.tokens = wanted_tokens(model, layers, options);
  std::map<int, std::string> keys;
  if (state.remembers(model)) {
    const std::string weights = model.current_fingerprint();
    for (const int layer : missing) {
      keys[layer] = state.key(model, weights, layer, state.tokens);
      if (auto moment = state.cached(layer, keys[layer])) {
        state.keep_factor(keys[layer], *moment);
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
    for (auto& [layer, moment] : Collection(state, model, missing, keys).run()) {
      if (!keys.empty() && (!group || group->rank() == 0))
        state.keep(keys[layer], [&, key = keys[layer], &made = moment](const std::filesystem::path& path) {
          save_second_moment(path, made, key);
        });
      if (!keys.empty()) state.keep_factor(keys[layer], moment);
      state.moments.emplace(layer, moment);
      state.computed.push_back(layer);
    }
    if (group) group->barrier();  // the cache is written when any process goes on
  }
  for (const int layer : asked)
    if (warn_of_quality(state, state.moments.at(layer))) break;
  state.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  options.log.event(LogLevel::kInfo, "statistics.ready", "statistics ready: " + state.source(), describe());
}

const SecondMoment& CorpusStatistics::get(int layer) const {
  return detail::prepared(state_->moments, layer);
}

// Rows that the model writes are kept like its moments: to write them takes longer than to use them.
std::vector<std::vector<int64_t>> CorpusStatistics::rows(const models::Model& model, int64_t tokens, Rows kind) {
  const CorpusState& state = *state_;
  const auto text = kind == Rows::kText ? state.text : std::nullopt;
  const auto take = [&] { return detail::make_row_source(model, text, state.options, kind)->take(tokens); };
  if (text) return take();
  const auto make = [&](const std::vector<int>&) {
    std::vector<int64_t> ids, lengths;
    for (const auto& row : take()) {
      ids.insert(ids.end(), row.begin(), row.end());
      lengths.push_back(std::ssize(row));
    }
    return Kept{{0, {{"ids", at::tensor(ids, at::kLong)}, {"lengths", at::tensor(lengths, at::kLong)}}}};
  };
  // Of a text's key the rule of sampling is a part where there is no corpus.
  const std::string name = kind == Rows::kText ? "text" : "talk, " + detail::sampling_rule(model).dump();
  const std::string what = "sampled " + name + ", " + std::to_string(tokens) + " tokens";
  const auto packed = CorpusStatistics::kept(model, what, {0}, make).at(0);
  const int64_t* next = packed.at("ids").const_data_ptr<int64_t>();
  const at::Tensor lengths = packed.at("lengths");
  std::vector<std::vector<int64_t>> rows;
  for (int64_t r = 0; r < lengths.size(0); ++r, next += std::ssize(rows.back()))
    rows.emplace_back(next, next + lengths.const_data_ptr<int64_t>()[r]);
  return rows;
}

StatisticsProvider::Kept CorpusStatistics::kept(const models::Model& model, const std::string& what,
                                                const std::vector<int>& layers, const MakeKept& make) {
  const CorpusState& state = *state_;
  if (!state.remembers(model)) return make(layers);
  const std::string weights = model.current_fingerprint();
  const auto key_of = [&](int layer) { return sha256_hex(state.key(model, weights, layer, 0) + " " + what); };
  Kept kept;
  std::vector<int> missing;
  for (const int layer : layers) {
    const auto file = state.unless_damaged([&] { return open_cached(state.path_of(key_of(layer))); });
    if (!file) {
      missing.push_back(layer);
      continue;
    }
    for (const auto& [name, entry] : file->tensors()) kept[layer][name] = file->tensor(name).clone();
  }
  if (missing.empty()) return kept;
  for (auto& [layer, tensors] : make(missing)) {
    state.keep(key_of(layer), [&, key = key_of(layer), &made = tensors](const std::filesystem::path& path) {
      write_checked(path, {made.begin(), made.end()}, {{"format", "emend " + what}, {"key", key}});
    });
    kept[layer] = tensors;
  }
  return kept;
}

nlohmann::json CorpusStatistics::describe() const {
  const CorpusState& state = *state_;
  nlohmann::json json = {{"source", state.source()},
                         {"tokens_wanted", state.tokens},
                         {"first_token", detail::name_of(state.options.first_token)},
                         {"max_length", state.options.max_length},
                         {"dtype", c10::toString(state.options.dtype)},
                         {"seed", state.options.seed},
                         {"layers_from_cache", state.from_cache},
                         {"layers_computed", state.computed},
                         {"seconds", state.seconds}};
  if (state.group) json["processes"] = state.group->size();
  if (state.text) json["text_sha256"] = state.text->fingerprint;
  if (!state.moments.empty()) json["tokens"] = state.moments.begin()->second.count();
  for (const auto& [layer, moment] : state.moments)
    if (const auto found = moment.origin().find("convergence"); found != moment.origin().end())
      json["convergence"]["layer " + std::to_string(layer)] = *found;
  return json;
}

}  // namespace emend::editors
