// Sampled text as the published evaluations draw it.
#pragma once

#include <emend/evaluation/evaluation.h>

#include <string>
#include <vector>

namespace emend::evaluation::detail {

/// One sample for each prompt: top-k 5, temperature 1, `options.generation_length` tokens with the prompt's, no stop at
/// the end-of-sequence token; decoded, NFKD, "\n\n" becomes a space. The texts begin with the prompts. Prompts that are
/// already that long come back as they are.
[[nodiscard]] std::vector<std::string> generate_texts(const models::Model& model,
                                                      const std::vector<std::string>& prompts,
                                                      const EvaluateOptions& options);

}  // namespace emend::evaluation::detail
