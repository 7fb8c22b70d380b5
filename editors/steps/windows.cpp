#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/editors/steps/windows.h>

#include <algorithm>

namespace emend::editors {

// In the order of FactStatus.
static int severity(FactStatus status) {
  constexpr int kSeverity[] = {0, 2, 1, 3};
  return kSeverity[static_cast<size_t>(status)];
}

std::vector<std::pair<int64_t, int64_t>> cut_target(int64_t tokens, const TargetWindows& windows) {
  EMEND_CHECK(tokens > 0 && windows.overlap >= 0 && (windows.size == 0 || windows.overlap < windows.size),
              "windows that go on");
  if (windows.size == 0) return {{0, tokens}};
  std::vector<std::pair<int64_t, int64_t>> cut;
  for (int64_t begin = 0;; begin += windows.size - windows.overlap) {
    cut.emplace_back(begin, std::min(begin + windows.size, tokens));
    if (cut.back().second == tokens) return cut;
  }
}

RenderedFact window_of(const RenderedFact& fact, std::pair<int64_t, int64_t> window) {
  RenderedFact part = fact;
  const auto [begin, end] = window;
  part.target_ids.assign(fact.target_ids.begin() + begin, fact.target_ids.begin() + end);
  if (begin == 0) return part;
  for (auto& row : part.rows) {
    row.ids.insert(row.ids.end(), fact.target_ids.begin(), fact.target_ids.begin() + begin);
    row.lookup = static_cast<int64_t>(row.ids.size()) - 1;
  }
  part.kl_rows.clear();
  return part;
}

void hold(TargetProblem& problem, const RenderedFact& earlier, const Target& target) {
  EMEND_CHECK(problem.rows.size() == earlier.rows.size(), "windows of the same fact");
  for (size_t row = 0; row < earlier.rows.size(); ++row)
    problem.held.push_back({row, earlier.rows[row].lookup, target.delta_D});
}

Target summarise(const std::vector<const Target*>& windows) {
  EMEND_CHECK(!windows.empty(), "a fact has windows");
  Target all = *windows[0];
  all.trace.reset();
  for (size_t w = 0; w < windows.size(); ++w) {
    const Target& one = *windows[w];
    if (w > 0) {
      all.steps += one.steps;
      all.curve.insert(all.curve.end(), one.curve.begin(), one.curve.end());
    }
    if (w > 0 && severity(one.status) > severity(all.status)) {
      all.status = one.status;
      all.reason = one.reason;
    }
    if (windows.size() > 1 && one.status == FactStatus::kFailed)
      all.reason = "window " + std::to_string(w + 1) + ": " + one.reason;
  }
  return all;
}

}  // namespace emend::editors
