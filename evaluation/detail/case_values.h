// A case's own figures, from the raw values that the families keep.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace emend::evaluation::detail {

/// {"efficacy_success": 1, "paraphrase_success": 0.5, …} of one case in one family, each in 0…1 (fluency in bit); only
/// what the case has. Damaged values are left out.
[[nodiscard]] std::map<std::string, double> case_values(const std::string& family, const nlohmann::json& raw);

/// The family's raw values of a line of cases.jsonl, `when` "pre" or "post"; null if absent.
[[nodiscard]] const nlohmann::json& case_metrics(const nlohmann::json& line, const std::string& when,
                                                 const std::string& family);

/// Probabilities exp(-nll) of the new and the old target after the fact's own prompt.
struct TargetProbabilities {
  std::optional<double> fresh, old;
};
[[nodiscard]] TargetProbabilities target_probabilities(const nlohmann::json& line, const std::string& when);

}  // namespace emend::evaluation::detail
