// The parts of the report page; each returns HTML, empty where the run has nothing to show.
#pragma once

#include <emend/evaluation/report.h>

#include <string>
#include <vector>

namespace emend::evaluation::detail {

/// A case that did not work out, and why; empty reason: it did.
struct CaseState {
  const nlohmann::json* line = nullptr;
  std::string status;
  std::string reason;
  [[nodiscard]] bool failed() const { return !reason.empty(); }
};
/// Failed ones first, otherwise in order.
[[nodiscard]] std::vector<CaseState> case_states(const RunReport& run);

[[nodiscard]] std::string heading(const RunReport& run, const std::vector<CaseState>& cases);
[[nodiscard]] std::string changes_section(const RunReport& run, const std::vector<CaseState>& cases);
[[nodiscard]] std::string metrics_section(const RunReport& run);
[[nodiscard]] std::string plots_section(const RunReport& run);
[[nodiscard]] std::string devices_section(const RunReport& run);
[[nodiscard]] std::string cases_section(const RunReport& run, const std::vector<CaseState>& cases);
[[nodiscard]] std::string reproduce_section(const RunReport& run);

}  // namespace emend::evaluation::detail
