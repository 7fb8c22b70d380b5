// Rotary scaling in GGUF files: keys under "rope.scaling", and tables of factors for Llama 3 and LongRoPE.
#pragma once

#include <emend/models/config.h>
#include <emend/models/gguf/detail/gguf_files.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace emend::models::detail {

struct RotaryContext {
  std::string prefix;  ///< "llama."
  double theta = 10000;
  int64_t dims = 0;
  int64_t positions = 0;  ///< context_length
};

/// The rope_scaling object for config.json, null for plain rotary embedding.
///
/// Llama 3 scaling is stored as a table of divisors only; its parameters are found by trying the published ones
/// (low 1, high 4, original length a power of two). A table that they do not explain becomes "longrope" with the same
/// list for short and long texts, which divides the frequencies in the same way. Throws Error(kCorruption) for a table
/// of the wrong length or values that are not positive.
[[nodiscard]] nlohmann::json rotary_scaling(const GgufFiles& files, const RotaryContext& context);

/// Llama 3's divisors of the dims / 2 frequencies, as stored in rope_freqs.weight.
[[nodiscard]] std::vector<float> llama3_divisors(const Rotary& rotary);

}  // namespace emend::models::detail
