#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/editors/steps/gate.h>
#include <emend/models/products.h>

namespace emend::editors {
namespace {

// Σ c x xᵀ in float64, products in the rows' dtype.
at::Tensor gram(const at::Tensor& x_ND, const at::Tensor& c_N) {
  const at::Tensor scaled_ND = x_ND * c_N.to(x_ND.scalar_type()).unsqueeze(1);
  return models::product(x_ND.t().contiguous(), scaled_ND.t()).to(at::kDouble);
}

at::Tensor solve(const at::Tensor& chol_DD, const at::Tensor& b_D) {
  return at::cholesky_solve(b_D.unsqueeze(1), chol_DD).squeeze(1);
}

}  // namespace

struct GateFit::State {
  at::Tensor x_ND, usual_N;
  at::Tensor ridge_DD, chol_DD;  // ρI and the factor of Σ usual x xᵀ + ρI, float64

  [[nodiscard]] at::Tensor sum(const at::Tensor& c_N) const {
    return x_ND.t().mv(c_N.to(x_ND.scalar_type())).to(at::kDouble);
  }
};

GateFit::GateFit(at::Tensor rows_ND, at::Tensor usual_N, double ridge) : state_(std::make_unique<State>()) {
  const at::NoGradGuard no_grad;
  if (!at::isfinite(rows_ND).all().item<bool>())
    throw Error(ErrorClass::kNumeric, {"gate", "a hidden state that is not finite", "finite numbers",
                                       "load the model in float32, or look for a damaged weight"});
  State& s = *state_;
  s.x_ND = std::move(rows_ND);
  s.usual_N = std::move(usual_N);
  const at::Tensor a_DD = gram(s.x_ND, s.usual_N);
  s.ridge_DD = at::eye(a_DD.size(0), a_DD.options()) * (a_DD.diagonal().mean() * ridge);
  s.chol_DD = at::linalg_cholesky(a_DD + s.ridge_DD);
}

GateFit::~GateFit() = default;

at::Tensor GateFit::constant() const {
  const at::NoGradGuard no_grad;
  return solve(state_->chol_DD, state_->sum(state_->usual_N)).to(at::kFloat);
}

at::Tensor GateFit::fit(const at::Tensor& sign_N, const at::Tensor& weight_N, int64_t steps) const {
  const at::NoGradGuard no_grad;
  const State& s = *state_;
  // The usual weights' factor gives a start for nothing: as if all rows lay within the margin.
  at::Tensor g_D = solve(s.chol_DD, s.sum(weight_N * sign_N)), before_N;
  for (int64_t step = 0; step < steps; ++step) {
    const at::Tensor within_N = s.x_ND.mv(g_D.to(s.x_ND.scalar_type())).mul_(sign_N.to(s.x_ND.scalar_type())) < 1;
    if (before_N.defined() && at::equal(within_N, before_N)) break;
    before_N = within_N;
    const at::Tensor rows = within_N.nonzero().squeeze(1);
    const at::Tensor x_ND = s.x_ND.index_select(0, rows), c_N = weight_N.index_select(0, rows);
    const at::Tensor b_D = x_ND.t().mv((c_N * sign_N.index_select(0, rows)).to(x_ND.scalar_type())).to(at::kDouble);
    g_D = solve(at::linalg_cholesky(gram(x_ND, c_N) + s.ridge_DD), b_D);
  }
  return g_D.to(at::kFloat);
}

}  // namespace emend::editors
