// What a long sequence of edits still holds, measured while it goes on.
#pragma once

#include <emend/datasets/fact.h>
#include <emend/evaluation/evaluation.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::workflow {

/// The state after `edits` facts, the first ones of `facts`: an entry of "lifelong" in results.json. Efficacy
/// (evaluation::success_share) of the first and of the last kEnds facts and of all, with the facts that "counts" says;
/// paraphrase, neighbourhood and free text of options.free_limit facts spread evenly over all so far; health where
/// options.health_data names its files. `neutral_PV`: what the unedited model says to evaluation::probe_prompts(), as
/// next_token_log_probs gives it. "seconds" and "peak_bytes" are added by the caller.
[[nodiscard]] nlohmann::json measure_sequence(const models::Model& model, const datasets::FactSet& facts, size_t edits,
                                              const at::Tensor& neutral_PV, evaluation::EvaluateOptions options);
inline constexpr size_t kEnds = 100;

/// The figures of one entry in the order of lifelong_heads(), "-" for those that were not measured.
[[nodiscard]] std::vector<std::string> lifelong_cells(const nlohmann::json& entry);
[[nodiscard]] std::vector<std::string> lifelong_heads();

}  // namespace emend::workflow
