#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/setting.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/solver.h>

#include <cmath>

namespace emend::editors {
namespace {

void require_rows(const char* what, const at::Tensor& x, int64_t rows) {
  if (x.size(0) == rows) return;
  refuse({"solve", std::string(what) + " of width " + std::to_string(x.size(0)), "width " + std::to_string(rows),
          "use second moments of the same model and layer as the keys"});
}

void require_finite(const at::Tensor& x, const char* what) {
  if (at::isfinite(x).all().item<bool>()) return;
  throw Error(ErrorClass::kNumeric, {"solve", std::string(what) + " with NaN or infinite entries", "finite numbers",
                                     "look at the model's activations: the model may be damaged"});
}

// Only C, scaled: its kept factor serves every λ.
bool only_moment(const Preserved& p) {
  return p.moment && p.lambda > 0 && p.ridge == 0 && !p.extra_FF.defined() && !p.previous_FP.defined();
}
// Nothing but a multiple of I.
bool only_ridge(const Preserved& p) {
  return (!p.moment || p.lambda == 0) && p.ridge > 0 && !p.extra_FF.defined();
}

// Solves with the preserved matrix, without the earlier keys.
class BaseSystem {
 public:
  BaseSystem(const Preserved& preserved, const SolveOptions& options, const at::Tensor& like) {
    Preserved base = preserved;
    base.previous_FP = at::Tensor();
    if (only_ridge(base)) {
      scale_ = base.ridge;
    } else if (only_moment(base)) {
      factor_ = base.moment.factor(options.dtype, like);
      scale_ = base.lambda;
    } else {
      factor_ = SpdFactor::of_built([&] { return base.matrix(options.dtype, like); }, options.dtype,
                                    "the preserved second moment");
    }
  }
  [[nodiscard]] at::Tensor solve(const at::Tensor& rhs) const { return (factor_ ? factor_->solve(rhs) : rhs) / scale_; }
  void describe(SolveReport* report) const {
    if (!report) return;
    report->jitter = factor_ ? factor_->jitter() * scale_ : 0;
    report->condition = factor_ ? factor_->condition() : 1;
  }

 private:
  std::optional<SpdFactor> factor_;
  double scale_ = 1;
};

// [I + KᵀY]⁻¹ applied to the last `columns` unit vectors; Y = base⁻¹K.
at::Tensor push_through(const at::Tensor& keys_FN, const BaseSystem& base, int64_t columns, at::ScalarType dtype) {
  const at::Tensor y_FN = base.solve(keys_FN);
  const int64_t n = keys_FN.size(1);
  at::Tensor inner_NN = keys_FN.t().mm(y_FN);
  inner_NN = (inner_NN + inner_NN.t()) / 2;
  inner_NN.diagonal().add_(1);
  const at::Tensor unit = at::eye(n, keys_FN.options()).narrow(1, n - columns, columns);
  return y_FN.mm(SpdFactor::of(inner_NN, dtype, "I + KᵀC⁻¹K").solve(unit));
}

SolveMethod choose(const Preserved& preserved, double f, double n_new, at::ScalarType dtype, const at::Tensor& like) {
  const double n = n_new + (preserved.previous_FP.defined() ? static_cast<double>(preserved.previous_FP.size(1)) : 0);
  const double cholesky = f * f * f / 3;
  Preserved base = preserved;
  base.previous_FP = at::Tensor();
  // By shapes alone, so that a run that is resumed chooses as it would have: a moment's factor is made once and kept.
  const double push = (only_ridge(base) || only_moment(base) ? 0 : cholesky) + 2 * f * f * n + f * n * n +
                      n * n * n / 3 + f * n * n_new;
  const double dense = f * f * n + cholesky + 2 * f * f * n_new;
  return push <= dense ? SolveMethod::kPushThrough : SolveMethod::kDense;
}

}  // namespace

at::Tensor routed(const at::Tensor& x, const at::Tensor& like, at::ScalarType dtype) {
  return devices::route_like(x, like, devices::Purpose::kSolve).to(dtype);
}

SpdFactor SpdFactor::of(const at::Tensor& matrix_FF, at::ScalarType dtype, const std::string& what) {
  const auto transpose = [&] {  // turned once more there
    return matrix_FF.t().to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
  };
  return of_built(transpose, dtype, what);
}

SpdFactor SpdFactor::of_built(const std::function<at::Tensor()>& build, at::ScalarType dtype, const std::string& what) {
  const at::NoGradGuard no_grad;
  const double first = dtype == at::kDouble ? 1e-14 : 1e-7;
  double mean = 0;
  int64_t width = 0;
  for (double relative = 0; relative <= first * 1.1e5; relative = relative == 0 ? first : 10 * relative) {
    if (relative > 0 && !(mean > 0 && std::isfinite(mean))) break;
    const at::Tensor matrix = build();
    if (relative == 0) {
      mean = matrix.diagonal().mean().item<double>();
      width = matrix.size(0);
    } else {
      matrix.diagonal().add_(relative * mean);
    }
    // Column-major, as LAPACK wants it; being symmetric, the matrix is its own transpose.
    at::Tensor columns = matrix.t(), info = at::empty({0}, matrix.options().dtype(at::kInt));
    at::linalg_cholesky_ex_out(columns, info, columns);
    if (info.item<int64_t>() == 0) return from_parts(columns, relative * mean);
  }
  throw Error(ErrorClass::kNumeric, {"solve", what + " (" + std::to_string(width) + " wide) is not positive definite",
                                     "a positive definite matrix",
                                     "take more text for the statistics (" + setting("stats_tokens") + ", " +
                                         setting("corpus") + "; at least ten times as many tokens as the width)"});
}

SpdFactor SpdFactor::from_parts(at::Tensor lower_FF, double jitter) {
  SpdFactor factor;
  factor.lower_FF_ = std::move(lower_FF);
  factor.jitter_ = jitter;
  return factor;
}

at::Tensor SpdFactor::solve(const at::Tensor& rhs_FE) const {
  // Not cholesky_solve: that copies the factor first.
  const at::Tensor half_FE = at::linalg_solve_triangular(lower_FF_, rhs_FE, /*upper=*/false);
  return at::linalg_solve_triangular(lower_FF_.t(), half_FE, /*upper=*/true);
}

double SpdFactor::condition() const {
  const at::Tensor diagonal = lower_FF_.diagonal();
  const double ratio = (diagonal.max() / diagonal.min()).item<double>();
  return ratio * ratio;
}

at::Tensor Preserved::matrix(at::ScalarType dtype, const at::Tensor& like) const {
  at::Tensor sum = at::zeros({like.size(0), like.size(0)}, like.options().dtype(dtype));
  if (moment && lambda != 0) sum.add_(routed(moment.cov_FF(), like, dtype), lambda);
  if (extra_FF.defined()) sum.add_(routed(extra_FF, like, dtype));
  if (previous_FP.defined()) {
    const at::Tensor previous = routed(previous_FP, like, dtype);
    sum.addmm_(previous, previous.t());
  }
  if (ridge != 0) sum.diagonal().add_(ridge);
  return sum;
}

at::Tensor solve_keys(const at::Tensor& keys_FE, const Preserved& preserved, const SolveOptions& options,
                      SolveReport* report) {
  const at::NoGradGuard no_grad;
  const int64_t width = keys_FE.size(0);
  if (preserved.moment) require_rows("a second moment", preserved.moment.cov_FF(), width);
  if (preserved.extra_FF.defined()) require_rows("a cached matrix", preserved.extra_FF, width);
  if (preserved.previous_FP.defined()) require_rows("earlier keys", preserved.previous_FP, width);
  const at::Tensor keys = keys_FE.to(options.dtype);
  require_finite(keys, "keys");

  SolveMethod method = options.method;
  if (method == SolveMethod::kAuto)
    method = choose(preserved, static_cast<double>(width), static_cast<double>(keys.size(1)), options.dtype, keys);

  at::Tensor solution;
  if (method == SolveMethod::kPushThrough) {
    const BaseSystem base(preserved, options, keys);
    at::Tensor all = keys;
    if (preserved.previous_FP.defined()) all = at::cat({routed(preserved.previous_FP, keys, options.dtype), keys}, 1);
    solution = push_through(all, base, keys.size(1), options.dtype);
    base.describe(report);
    if (report) report->method = "push-through";
  } else {
    const auto system = [&] { return preserved.matrix(options.dtype, keys).addmm_(keys, keys.t()); };
    const auto factor = SpdFactor::of_built(system, options.dtype, "λC + KKᵀ");
    solution = factor.solve(keys);
    if (report) *report = {"dense", factor.jitter(), factor.condition()};
  }
  require_finite(solution, "a solution");
  return solution;
}

at::Tensor solve_preserved(const at::Tensor& rhs_FE, const Preserved& preserved, const SolveOptions& options,
                           SolveReport* report) {
  const at::NoGradGuard no_grad;
  if (preserved.moment) require_rows("a second moment", preserved.moment.cov_FF(), rhs_FE.size(0));
  const at::Tensor rhs = rhs_FE.to(options.dtype);
  require_finite(rhs, "a right-hand side");
  at::Tensor solution;
  if (preserved.previous_FP.defined()) {
    const auto factor = SpdFactor::of_built([&] { return preserved.matrix(options.dtype, rhs); }, options.dtype,
                                            "the preserved second moment");
    solution = factor.solve(rhs);
    if (report) *report = {"dense", factor.jitter(), factor.condition()};
  } else {
    const BaseSystem base(preserved, options, rhs);
    solution = base.solve(rhs);
    base.describe(report);
    if (report) report->method = "preserved";
  }
  require_finite(solution, "a solution");
  return solution;
}

}  // namespace emend::editors
