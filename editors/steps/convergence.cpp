#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/editors/steps/convergence.h>

#include <cmath>
#include <limits>

namespace emend::editors {

nlohmann::json HalvesReport::to_json() const {
  const auto number = [](double value) { return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(); };
  return {{"tokens", tokens},
          {"distance", number(distance)},
          {"disagreement", number(disagreement)},
          {"condition", condition > 0 ? number(condition) : nlohmann::json()}};
}

HalvesReport compare_halves(const at::Tensor& a_FF, const at::Tensor& b_FF, int64_t tokens) {
  const at::NoGradGuard no_grad;
  HalvesReport report;
  report.tokens = tokens;
  report.distance = (2 * (a_FF - b_FF).norm() / (a_FF + b_FF).norm()).item<double>();
  const auto [lower_FF, info] = at::linalg_cholesky_ex(a_FF);
  if (info.item<int64_t>() != 0) {
    report.disagreement = std::numeric_limits<double>::infinity();
    return report;
  }
  const double trace = at::cholesky_solve(b_FF, lower_FF).diagonal().sum().item<double>();
  report.disagreement = trace / static_cast<double>(a_FF.size(0)) - 1;
  const at::Tensor diagonal = lower_FF.diagonal();
  const double ratio = (diagonal.max() / diagonal.min()).item<double>();
  report.condition = ratio * ratio;
  return report;
}

}  // namespace emend::editors
