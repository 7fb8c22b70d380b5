// What `emend bench` and `emend doctor --full` measure and how it is written down: the engines, the phases of an edit
// on random weights of a published model's size (what they cost, without fetching anything), editors beside each other
// (--quality), and the machine.
#pragma once

#include "options.h"

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
/// Without a reference (0 seconds) the ratio is left out; of a phase that took no time only the seconds are told.
[[nodiscard]] nlohmann::ordered_json phase_document(const Measure& reference, const Measure& fast, double peak,
                                                    int64_t facts = 0);

struct SyntheticOptions {
  int64_t facts = 8;
  int64_t reference_facts = 1;  ///< the reference engine is measured on so many and scaled; 0: not at all
  int64_t steps = 25;           ///< of the optimisation; each fact ends after some number from half of them on
  int64_t statistics_tokens = 4096;
  bool targets = true, statistics = true;  ///< what is timed; targets with keys and insertion
  int64_t solve_width = 8192;              ///< widest keys whose systems are solved
  editors::EditSettings compute;           ///< also with its arithmetic, where that is not the model's own
  std::vector<int64_t> growth;             ///< numbers of facts
  uint64_t seed = 0;
};

/// Targets, keys, insertion and statistics on facts like CounterFact's (6 contexts of 0 or 9 tokens, subjects of 3,
/// prompts of 4 behind them, answers of 2) made of random tokens.
[[nodiscard]] nlohmann::ordered_json bench_synthetic(const models::Model& model, const SyntheticOptions& options,
                                                     const Common& common, const nlohmann::ordered_json& machine);

struct QualityArguments {
  bool wanted = false;
  std::vector<std::string> editors;
  std::vector<int64_t> seeds;
};

/// As --limit, where none was given: eight facts to be timed, all to be compared.
inline constexpr int64_t kFactsByPurpose = -2;

/// Adds --quality, --editors, --seeds, --out and --resume, which goes on from the command line that the folder keeps,
/// and says which options of an edit go with them alone.
void add_quality_options(Options& o, QualityArguments& quality, workflow::RunOptions& edit);

/// Runs what is not finished and prints the table of all; without editors and --resume only the table. `o` are the
/// options that were parsed. Throws what compare_variants and draw_comparison throw.
int run_quality(const Options& o, const QualityArguments& quality, workflow::RunOptions edit, Common& common);

/// Looks for GPUs, driver and LibTorch's CUDA half; copies between all devices of the device map; edits a tiny built-in
/// model with ROME, MEMIT and LoRA on each device, every pair, the CPU with each and all together, in three dtypes, and
/// compares with the CPU; times products, attention and the solve. Prints the verdicts, or
/// {"devices", "checks", "timings", "ok"}. Returns 0, or kDevice's status if a check failed. Never throws for a
/// finding.
int run_full_check(const ModelOptions& options, const Common& common);

}  // namespace emend::tools
