// Choosing the next token of one row from its logits.
#pragma once

#include <emend/models/generation.h>

#include <random>

namespace emend::models::detail {

/// A row's own random stream: depends on the seed and the row number alone.
class RowRandom {
 public:
  RowRandom(uint64_t seed, int64_t row);
  /// In [0, 1), the same on every platform.
  [[nodiscard]] double uniform();

 private:
  std::mt19937_64 engine_;
};

/// Divides positive and multiplies negative logits of the ids already in the text (each once).
void penalise_repetition(float* logits, int64_t n, const std::vector<int64_t>& text, double penalty);

/// Temperature, then top-k, top-p and min-p, then a draw; the largest logit when the temperature is 0.
[[nodiscard]] int64_t choose_token(const float* logits, int64_t n, const GenerateOptions& options, RowRandom& random);

}  // namespace emend::models::detail
