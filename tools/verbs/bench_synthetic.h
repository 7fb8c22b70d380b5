// The phases of an edit on random weights of a published model's size: what they cost, without fetching anything.
#pragma once

#include <emend/models/model.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../cli.h"
#include "../compute_options.h"

namespace emend::tools {

struct SyntheticOptions {
  int64_t facts = 8;
  int64_t reference_facts = 1;  ///< the reference engine is measured on so many and scaled; 0: not at all
  int64_t steps = 25;           ///< of the optimisation: nothing stops it earlier
  int64_t statistics_tokens = 4096;
  int64_t solve_width = 8192;   ///< widest keys whose systems are solved
  ComputeChoice compute;        ///< also with this arithmetic, where it is not the model's own
  std::vector<int64_t> growth;  ///< numbers of facts
  uint64_t seed = 0;
};

/// Targets, keys, insertion and statistics on facts like CounterFact's (6 contexts of 0 or 9 tokens, subjects of 3,
/// prompts of 4 behind them, answers of 2) made of random tokens.
[[nodiscard]] nlohmann::ordered_json bench_synthetic(const models::Model& model, const SyntheticOptions& options,
                                                     const Common& common, const nlohmann::ordered_json& machine);

}  // namespace emend::tools
