#include "sampling_options.h"

namespace emend::tools {

void add_sampling_options(CLI::App& command, models::GenerateOptions& generate) {
  const char* group = "Sampling";
  command.add_option("--max-new-tokens", generate.max_new_tokens, "tokens to add")
      ->group(group)
      ->check(CLI::PositiveNumber);
  command.add_option("--temperature", generate.temperature, "0 is greedy")->group(group)->check(CLI::NonNegativeNumber);
  command.add_option("--top-k", generate.top_k, "keep the k likeliest tokens; 0: all")
      ->group(group)
      ->check(CLI::NonNegativeNumber);
  command.add_option("--top-p", generate.top_p, "keep the likeliest tokens of this total probability")
      ->group(group)
      ->check(CLI::Range(0.0, 1.0));
  command.add_option("--min-p", generate.min_p, "drop tokens below this share of the likeliest")
      ->group(group)
      ->check(CLI::Range(0.0, 1.0));
  command.add_option("--repetition-penalty", generate.repetition_penalty, "1: none")
      ->group(group)
      ->check(CLI::PositiveNumber);
  command.add_option("--seed", generate.seed, "random seed")->group(group);
  command.add_option("--prefill-chunk", generate.prefill_chunk, "prompt tokens per pass")
      ->group(group)
      ->check(CLI::PositiveNumber);
}

}  // namespace emend::tools
