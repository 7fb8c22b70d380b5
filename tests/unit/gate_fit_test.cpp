// Gates of LATCH: against their optimality conditions, a dense solution, and one another.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/editors/steps/neurons.h>
#include <gtest/gtest.h>

#include <limits>

#include "support/editor_models.h"

namespace emend {
namespace gate_fit_test {

using testing::random_matrix;
using testing::relative_difference;

struct Problem {
  at::Tensor rows_ND, sign_N, weight_N, usual_N;

  // The rows that are not as usual, or all.
  [[nodiscard]] editors::GateRule rule(bool all = false) const {
    const at::Tensor index = (sign_N.gt(0).logical_or(weight_N != usual_N))
                                 .logical_or(at::full_like(sign_N, all ? 1 : 0, at::kBool))
                                 .nonzero()
                                 .squeeze(1);
    return {index, sign_N.index_select(0, index), weight_N.index_select(0, index)};
  }
};

at::Tensor fit(const editors::GateFit& gates, const editors::GateRule& rule) {
  return gates.fit(std::vector{rule}, 50)[0];
}

Problem made_up() {
  Problem p;
  p.rows_ND = random_matrix(300, 24, 3) + 0.5;
  p.sign_N = at::full({300}, -1, at::kFloat);
  p.sign_N.narrow(0, 0, 6).fill_(1);
  p.usual_N = at::full({300}, 1.0 / 300, at::kDouble);
  p.weight_N = p.usual_N.clone();
  p.weight_N.narrow(0, 0, 6).fill_(1.0 / 6);
  return p;
}

// Convex: where no direction goes down is the minimum. `ridge_from`: the rows, with their weights, that ρ is taken
// from.
void expect_minimum(const Problem& p, const at::Tensor& gate_D, const at::Tensor& ridge_rows_ND,
                    const at::Tensor& ridge_weight_N) {
  const at::Tensor g_D = gate_D.to(at::kDouble), x = p.rows_ND.to(at::kDouble), y = p.sign_N.to(at::kDouble);
  const at::Tensor from = ridge_rows_ND.to(at::kDouble);
  const double rho = 1e-3 * (from.t() * ridge_weight_N).mm(from).diagonal().mean().item<double>();
  const auto loss = [&](const at::Tensor& g) {
    const at::Tensor short_N = (1 - y * x.mv(g)).clamp_min(0);
    return 0.5 * ((p.weight_N * short_N.square()).sum() + rho * g.square().sum()).item<double>();
  };
  const double least = loss(g_D);
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const at::Tensor step = random_matrix(24, 1, 100 + seed).squeeze(1).to(at::kDouble);
    EXPECT_GT(loss(g_D + step * (1e-3 * g_D.norm() / step.norm())), least) << seed;
  }
  EXPECT_GT((y * x.mv(g_D)).masked_select(y > 0).min().item<double>(), 0) << "open at its own rows";
}

TEST(GateFit, IsTheMinimumOfTheSquaredHinge) {
  const Problem p = made_up();
  const at::Tensor g_D = fit(editors::GateFit(p.rows_ND, p.usual_N), p.rule());
  expect_minimum(p, g_D, p.rows_ND, p.usual_N);
}

// What a start on every `step`-th row of the text consists of, and the weights of its rows.
std::pair<at::Tensor, at::Tensor> start_of(const Problem& p, int64_t text, int64_t step) {
  const at::Tensor some =
      at::cat({at::arange(0, text, step, at::kLong), at::arange(text, p.rows_ND.size(0), at::kLong)});
  at::Tensor weight = p.usual_N.index_select(0, some).clone();
  weight.narrow(0, 0, text / step).mul_(static_cast<double>(step));
  return {p.rows_ND.index_select(0, some), weight};
}

TEST(GateFit, AStartOnSomeRowsEndsInTheMinimumOfAll) {
  Problem p = made_up();
  for (at::Tensor* x : {&p.rows_ND, &p.sign_N, &p.weight_N, &p.usual_N}) *x = x->flip(0);  // the text first
  const int64_t text = 294, step = 7;
  const at::Tensor g_D = fit(editors::GateFit(p.rows_ND, p.usual_N, {text, step}), p.rule());
  const auto [start_ND, weight_N] = start_of(p, text, step);
  expect_minimum(p, g_D, start_ND, weight_N);
}

TEST(GateFit, GatesSideBySideAreThoseOfOneAtATime) {
  Problem p = made_up();
  for (at::Tensor* x : {&p.rows_ND, &p.sign_N, &p.weight_N, &p.usual_N}) *x = x->flip(0);
  Problem other = p;
  other.sign_N = at::full({300}, -1, at::kFloat);
  other.sign_N.narrow(0, 100, 9).fill_(1);
  other.weight_N = p.usual_N.clone();
  other.weight_N.narrow(0, 100, 9).fill_(0.2);
  other.weight_N.narrow(0, 110, 5).zero_();
  const editors::GateFit gates(p.rows_ND, p.usual_N, {294, 7});
  const std::vector rules = {p.rule(), other.rule(), p.rule(/*all=*/true), other.rule(true)};
  const auto together = gates.fit(rules, 50);
  for (size_t i = 0; i < rules.size(); ++i)
    EXPECT_LT(relative_difference(together[i], fit(gates, rules[i])), 1e-5) << i;
  EXPECT_LT(relative_difference(together[2], together[0]), 1e-4) << "rows that say the usual say nothing";
  EXPECT_LT(relative_difference(together[3], together[1]), 1e-4);
  const auto [start_ND, weight_N] = start_of(p, 294, 7);
  expect_minimum(other, together[1], start_ND, weight_N);
}

TEST(GateFit, ReaderIsTheDenseLeastSquaresSolution) {
  const Problem p = made_up();
  const at::Tensor open_MD = p.rows_ND.narrow(0, 0, 6);
  const at::Tensor u_D = editors::GateFit(p.rows_ND, p.usual_N).reader(open_MD).to(at::kDouble);
  const at::Tensor x = p.rows_ND.to(at::kDouble), open = open_MD.to(at::kDouble);
  const at::Tensor a = (x.t() * p.usual_N).mm(x);
  const at::Tensor left = a + open.t().mm(open) / 6 + at::eye(24, at::kDouble) * (1e-3 * a.diagonal().mean());
  const at::Tensor dense = at::linalg_solve(left, open.mean(0));
  EXPECT_LT(relative_difference(u_D, dense), 1e-4);
}

TEST(GateFit, LevelIsTheDenseLeastSquaresSolution) {
  const Problem p = made_up();
  const at::Tensor x = p.rows_ND.to(at::kDouble), a = (x.t() * p.usual_N).mm(x);
  const at::Tensor dense =
      at::linalg_solve(a + at::eye(24, at::kDouble) * (1e-3 * a.diagonal().mean()), x.t().mv(p.usual_N));
  EXPECT_LT(relative_difference(editors::GateFit(p.rows_ND, p.usual_N).level().to(at::kDouble), dense), 1e-4);
}

TEST(GateFit, RefusesWhatIsNotFinite) {
  Problem p = made_up();
  p.rows_ND[3][2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(editors::GateFit(p.rows_ND, p.usual_N), Error);
}

}  // namespace gate_fit_test
}  // namespace emend
