// Rows of token ids to take statistics from: a corpus's documents, or text that the model samples.
#pragma once

#include <emend/editors/steps/statistics.h>

namespace emend::editors::detail {

using TokenRows = std::vector<std::vector<int64_t>>;

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

/// `text` absent: sampled. References must outlive the source.
[[nodiscard]] std::unique_ptr<RowSource> make_row_source(const models::Model& model,
                                                         const std::optional<StatisticsText>& text,
                                                         const StatisticsOptions& options);

/// Longest row.
[[nodiscard]] int64_t row_limit(const models::Model& model, const StatisticsOptions& options);

/// What decides sampled text besides seed and length, for cache keys.
[[nodiscard]] nlohmann::json sampling_rule(const models::Model& model);

}  // namespace emend::editors::detail
