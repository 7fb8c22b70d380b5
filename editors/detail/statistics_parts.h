// For second moments: rows of token ids (of a corpus, or sampled by the model) and sums of k·kᵀ over them.
#pragma once

#include <emend/devices/collectives.h>
#include <emend/editors/steps/statistics.h>

#include <random>

namespace emend::editors::detail {

using TokenRows = std::vector<std::vector<int64_t>>;

/// Fisher-Yates with a fixed generator: std::shuffle differs between standard libraries.
template <class T>
void shuffle(std::vector<T>& items, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random() % i]);
}

/// A stream of rows; the same rows in the same order for the same settings, however they are asked for.
class RowSource {
 public:
  virtual ~RowSource() = default;
  /// The next rows, until they have at least `tokens` tokens that count (or the text ends). Throws
  /// Error(kCancelled); Error(kInvalidArgument) for a text without any token.
  [[nodiscard]] virtual TokenRows take(int64_t tokens) = 0;
  /// Passes over rows that an earlier run has already counted.
  virtual void skip(int64_t rows) = 0;
  [[nodiscard]] virtual bool exhausted() const = 0;
};

/// `text` absent: sampled, behind beginnings of this kind. References must outlive the source.
[[nodiscard]] std::unique_ptr<RowSource> make_row_source(const models::Model& model,
                                                         const std::optional<StatisticsText>& text,
                                                         const StatisticsOptions& options, Rows kind = Rows::kText);

/// Longest row.
[[nodiscard]] int64_t row_limit(const models::Model& model, const StatisticsOptions& options);

/// What decides sampled text besides seed and length, for cache keys.
[[nodiscard]] nlohmann::json sampling_rule(const models::Model& model);

/// The layer's moment. Throws Error(kInvalidArgument) if it was not prepared.
[[nodiscard]] const SecondMoment& prepared(const std::map<int, SecondMoment>& moments, int layer);

/// Adds c·k·kᵀ of every row k, in the rows' dtype, to the lower triangle of a sum (and what the blocks on the diagonal
/// have above it). Its columns are added in blocks, each from its diagonal down: a little more than half of the
/// arithmetic of the whole square. weight_N: c; undefined: 1.
void add_products(const at::Tensor& sum_FF, const at::Tensor& keys_NF, const at::Tensor& weight_N = {},
                  int64_t block = 384);

/// What has been added up.
struct Sums {
  std::map<int, at::Tensor> sums_FF;  ///< a layer; float64, on the layers' devices; the lower triangle
  int64_t count = 0, documents = 0;
  int64_t number = 0;  ///< of batches seen, by all processes
};

/// "count" or "skip".
[[nodiscard]] std::string name_of(FirstToken first);

[[nodiscard]] int64_t tokens_of(const std::vector<std::vector<int64_t>>& rows);

/// Adds the keys of these rows, row r to half r mod halves.size(). With a group, batch b is computed by process b mod
/// size, so that every batch is the one of a single process. `seen` hears the tokens of each batch, whoever had it.
void add_rows(const models::Model& model, const std::vector<std::vector<int64_t>>& rows, const std::vector<int>& layers,
              const StatisticsOptions& options, devices::Collectives* group, std::vector<Sums>& halves,
              const std::function<void(int64_t)>& seen);

/// Of all processes, on the host.
[[nodiscard]] Sums total_of(const models::Model& model, const Sums& mine, const std::vector<int>& layers,
                            devices::Collectives* group);

/// The reports of two halves, a layer each; nothing unless both have tokens.
[[nodiscard]] std::map<int, HalvesReport> compare(const std::vector<Sums>& totals);

/// The moments of all halves together. `more` adds to what is told of a layer's origin. Throws Error(kInvalidArgument)
/// if there are no tokens.
[[nodiscard]] std::map<int, SecondMoment> moments_of(
    const std::vector<Sums>& totals, const StatisticsOptions& options,
    const std::function<void(int layer, nlohmann::json& origin)>& more = {});

}  // namespace emend::editors::detail
