// Second moments of the keys, C_l = E[k kᵀ], over a corpus: what an edit should leave alone.
//
// Goals: one pass for all layers; sums in float64; a cache that can never be stale (its key holds everything the
// numbers depend on). Non-goal: the published 44 million tokens by default; about ten tokens a key dimension suffice.
#pragma once

#include <emend/core/cancel.h>
#include <emend/core/log.h>
#include <emend/models/model.h>

#include <chrono>
#include <filesystem>
#include <map>

namespace emend::devices {
class Collectives;
}
namespace emend::editors {

class SpdFactor;
namespace detail {
struct CorpusState;
}

/// C of one layer with what it was made from. Cheap to copy (shared).
class SecondMoment {
 public:
  SecondMoment() = default;
  /// cov_FF symmetric, float32 or float64. Throws Error(kInvalidArgument) unless square and finite.
  explicit SecondMoment(at::Tensor cov_FF, int64_t count = 0, nlohmann::json origin = {});

  [[nodiscard]] const at::Tensor& cov_FF() const;      ///< not to be written to
  [[nodiscard]] int64_t width() const;                 ///< F
  [[nodiscard]] int64_t count() const;                 ///< tokens; 0 if unknown
  [[nodiscard]] const nlohmann::json& origin() const;  ///< corpus, tokens, BOS rule, …
  /// Cholesky factor of C in `dtype` on the device of `like`, computed at the first call and kept with the moment (all
  /// copies share it). Throws Error(kNumeric) as SpdFactor::of does.
  [[nodiscard]] SpdFactor factor(at::ScalarType dtype, const at::Tensor& like) const;
  /// Lets float64 factors come from, and go to, `path`: a file like those of save_second_moment, under `key`. Moments
  /// below `least_width` are factored faster than read, so nothing is stored for them. A damaged file is made again.
  void keep_factor_at(const std::filesystem::path& path, const std::string& key, int64_t least_width = 4096) const;
  [[nodiscard]] explicit operator bool() const noexcept { return state_ != nullptr; }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Ordinary rows of text.
enum class Rows {
  kText,  ///< that of the moments
  kTalk,  ///< what people say to each other, as the model writes it: what an encyclopedia hardly has
};

/// Gives second moments to editors. What is given refers to the model as it was at the first prepare(): sequential
/// edits keep using it, as published implementations do.
class StatisticsProvider {
 public:
  virtual ~StatisticsProvider() = default;
  /// Makes the moments of these layers available, together, in one pass. Layers that are there already cost nothing.
  virtual void prepare(const models::Model& model, const std::vector<int>& layers) = 0;
  /// Throws Error(kInvalidArgument) if the layer was not prepared.
  [[nodiscard]] virtual const SecondMoment& get(int layer) const = 0;
  /// At least `tokens` tokens as rows of ids; nothing if there is no text.
  [[nodiscard]] virtual std::vector<std::vector<int64_t>> rows(const models::Model& model, int64_t tokens,
                                                               Rows kind = Rows::kText) {
    (void)model, (void)tokens, (void)kind;
    return {};
  }
  /// What an editor derives from that text, the model as it is and each of these layers, under the name `what`: made
  /// for the layers for which no earlier run left it in the cache.
  using Kept = std::map<int, std::map<std::string, at::Tensor>>;
  using MakeKept = std::function<Kept(const std::vector<int>& layers)>;
  [[nodiscard]] virtual Kept kept(const models::Model& model, const std::string& what, const std::vector<int>& layers,
                                  const MakeKept& make) {
    (void)model, (void)what;
    return make(layers);
  }
  /// For reports: corpus, tokens, settings, cache hits.
  [[nodiscard]] virtual nlohmann::json describe() const = 0;
};

/// Moments that were made elsewhere (fixtures, published files).
class FixedStatistics final : public StatisticsProvider {
 public:
  explicit FixedStatistics(std::map<int, SecondMoment> moments) : moments_(std::move(moments)) {}
  void prepare(const models::Model& model, const std::vector<int>& layers) override;  ///< checks presence and widths
  [[nodiscard]] const SecondMoment& get(int layer) const override;
  [[nodiscard]] nlohmann::json describe() const override;

 private:
  std::map<int, SecondMoment> moments_;
};

enum class FirstToken {
  kCount,  ///< as the published code: the first token (BOS where the tokenizer adds it) counts like any other
  kSkip,   ///< leave each document's first token out: many models have huge activations there
};

/// StatisticsOptions::tokens: read until two halves of the text agree.
inline constexpr int64_t kAutoTokens = -1;

struct StatisticsOptions {
  int64_t tokens = 0;  ///< tokens to count; 0: ten a key dimension; kAutoTokens: as many as it takes
  /// kAutoTokens: stop once the halves' disagreement (HalvesReport) is at most this in every layer, asked at 8, 16, 32
  /// … tokens a key dimension, at most 128. 0.25 is what ten independent tokens a dimension give.
  double convergence = 0.25;
  int64_t max_length = 512;  ///< a document is cut here (and at the model's own limit)
  FirstToken first_token = FirstToken::kCount;
  at::ScalarType dtype = at::kDouble;   ///< of the stored moments; sums are float64 always
  int64_t batch_tokens = 4096;          ///< tokens a forward pass
  std::chrono::seconds save_every{60};  ///< with a cache: how often the sums of an unfinished collection are saved
  uint64_t seed = 0;                    ///< order of the documents; sampled text where there is no corpus
  std::filesystem::path cache = {};     ///< folder; empty: no cache
  bool cache_is_output = false;         ///< what cannot be kept there is an error; else a warning
  CancelToken cancel = {};
  ProgressFn progress = {};
  Log log = {};
};

/// Documents to take statistics from.
struct StatisticsText {
  std::string fingerprint;  ///< sha256 of the text; part of the cache key
  std::string name;         ///< for reports
  /// Calls `sink` for each document until it returns false.
  std::function<void(const std::function<bool(const std::string& document)>& sink)> each;

  /// A file as datasets::read_corpus reads it. Throws Error(kNotFound, kIo).
  [[nodiscard]] static StatisticsText from_file(const std::filesystem::path& path);
};

/// Statistics over a corpus; without one, over text that the model itself samples (with the seed).
class CorpusStatistics : public StatisticsProvider {
 public:
  /// `group`: processes that compute the moments together. They must make the same calls; each reads the corpus (or
  /// samples the same text) and takes its share of the batches, the first one writes the cache. The numbers are those
  /// of one process, up to the rounding of sums in float64. It must outlive the provider; if a process is lost,
  /// prepare() throws Error(kDevice) in the others.
  CorpusStatistics(std::optional<StatisticsText> text, StatisticsOptions options,
                   devices::Collectives* group = nullptr);
  ~CorpusStatistics() override;
  /// Throws Error(kInvalidArgument) for a corpus without tokens, Error(kCorruption) for a damaged one,
  /// Error(kCancelled). A damaged cache file is reported and recomputed. The documents are shuffled with the seed; at
  /// most 64 MiB of text are considered.
  void prepare(const models::Model& model, const std::vector<int>& layers) override;
  [[nodiscard]] const SecondMoment& get(int layer) const override;
  [[nodiscard]] std::vector<std::vector<int64_t>> rows(const models::Model& model, int64_t tokens,
                                                       Rows kind = Rows::kText) override;
  [[nodiscard]] Kept kept(const models::Model& model, const std::string& what, const std::vector<int>& layers,
                          const MakeKept& make) override;
  [[nodiscard]] nlohmann::json describe() const override;

 private:
  std::unique_ptr<detail::CorpusState> state_;
};

/// One pass over rows of token ids, stopping after the last layer needed: Σ k kᵀ / count for each layer.
/// `skip_first` leaves the first token of each row out of sum and count.
[[nodiscard]] std::map<int, SecondMoment> collect_second_moments(const models::Model& model,
                                                                 const std::vector<std::vector<int64_t>>& rows,
                                                                 const std::vector<int>& layers,
                                                                 const StatisticsOptions& options);

/// What two halves say about each other.
struct HalvesReport {
  int64_t tokens = 0;   ///< in both
  double distance = 0;  ///< ‖A − B‖/‖(A + B)/2‖, Frobenius: what the large directions say
  /// (tr(A⁻¹B) + tr(B⁻¹A))/2F − 1, never negative: how much more of a half lies where the other saw little. All
  /// directions count alike, as they do in a solve with C. n independent tokens a dimension in all give about
  /// 2/(n − 2): 0.25 for ten. Infinite while A or B is singular.
  double disagreement = 0;
  double condition = 0;  ///< of A, estimated from its Cholesky factor; 0 while A is singular

  [[nodiscard]] nlohmann::json to_json() const;  ///< infinite values become null
};

/// a_FF and b_FF: the second moments (means, not sums) of the halves, float64, on the host or on one device.
[[nodiscard]] HalvesReport compare_halves(const at::Tensor& a_FF, const at::Tensor& b_FF, int64_t tokens);

/// Cache files: safetensors with version, key and checksum. load returns nothing if there is no file; throws
/// Error(kCorruption) if there is a damaged one.
void save_second_moment(const std::filesystem::path& path, const SecondMoment& moment, const std::string& key);
[[nodiscard]] std::optional<SecondMoment> load_second_moment(const std::filesystem::path& path, const std::string& key);

// Second moments as the MEMIT repository publishes them: one .npz file a layer with the entries mom2.mom2 (the sum
// of k kᵀ over the tokens) and mom2.count (the tokens).

/// The mean, float64. Throws Error(kNotFound) if there is no such file or it lacks "mom2.mom2", Error(kCorruption) for
/// a damaged file, a count below 1 or a sum that is not a finite, square, symmetric matrix.
[[nodiscard]] SecondMoment read_published_moment(const std::filesystem::path& path);

/// Moments from the files that `pattern` names, "{layer}" standing for the layer's number, read when a layer is first
/// prepared. prepare() throws Error(kInvalidArgument) for moments of another width than the model's keys. The files say
/// nothing of the model they were made with: that is for the caller to know.
[[nodiscard]] std::unique_ptr<StatisticsProvider> make_published_statistics(std::string pattern, Log log = {});

}  // namespace emend::editors
