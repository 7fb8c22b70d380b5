// What `emend bench` measures, how it is written down, and the phases of an edit on random weights of a published
// model's size: what they cost, without fetching anything.
#pragma once

#include "model_options.h"

namespace emend::tools {

/// Seconds, arithmetic and peak memory of one way to do a phase.
struct Measure {
  double seconds = 0;
  double gflop = 0;
  nlohmann::ordered_json peak_bytes;  ///< a device; "host" is the process
};

/// Runs `work`; peaks of the host and of the model's devices start anew.
[[nodiscard]] Measure measured(const models::Model& model, const std::function<void()>& work);

/// Processor, cores, threads, load and the best of several products of square matrices, a dtype each.
[[nodiscard]] nlohmann::ordered_json describe_machine(const models::Model& model);

/// Seconds of both ways and their ratio, facts a second, arithmetic and its share of `peak` (10⁹ operations a second).
/// Without a reference (0 seconds) the ratio is left out.
[[nodiscard]] nlohmann::ordered_json phase_document(const Measure& reference, const Measure& fast, double peak,
                                                    int64_t facts = 0);

struct SyntheticOptions {
  int64_t facts = 8;
  int64_t reference_facts = 1;  ///< the reference engine is measured on so many and scaled; 0: not at all
  int64_t steps = 25;           ///< of the optimisation; each fact ends after some number from half of them on
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
