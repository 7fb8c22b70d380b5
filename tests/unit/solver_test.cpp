#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <emend/core/error.h>
#include <emend/editors/steps/solver.h>
#include <gtest/gtest.h>

#include <Eigen/Cholesky>
#include <Eigen/Dense>

#include "support/editor_models.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace emend {
namespace solver_test {

using editors::Preserved;
using editors::SecondMoment;
using editors::SolveMethod;
using editors::SolveOptions;
using editors::SpdFactor;
using testing::expect_error;
using testing::random_matrix;
using testing::random_spd;
using testing::relative_difference;

using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Eigen::Map<const RowMajor> as_eigen(const at::Tensor& x) {
  return {x.const_data_ptr<double>(), x.size(0), x.size(1)};
}

// (preserved + KKᵀ)⁻¹K by another library.
at::Tensor eigen_solve(const at::Tensor& system_FF, const at::Tensor& keys_FE) {
  const at::Tensor keys = keys_FE.contiguous();
  const RowMajor total = as_eigen(system_FF.contiguous()) + as_eigen(keys) * as_eigen(keys).transpose();
  const RowMajor solution = total.ldlt().solve(RowMajor(as_eigen(keys)));
  return at::from_blob(const_cast<double*>(solution.data()), {keys.size(0), keys.size(1)}, at::kDouble).clone();
}

SolveOptions with(SolveMethod method, at::ScalarType dtype = at::kDouble) {
  return {dtype, method};
}

// Counts what this thread allocates on the host.
class AllocationCounter final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
    now_ += size;
    peak_ = std::max(peak_, now_);
  }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
  [[nodiscard]] int64_t peak() const { return peak_; }

 private:
  int64_t now_ = 0, peak_ = 0;
};

struct Case {
  const char* name;
  Preserved preserved;
};

std::vector<Case> cases(int64_t width) {
  const SecondMoment moment(random_spd(width, 1));
  const at::Tensor extra = random_spd(width, 2, 0), previous = random_matrix(width, 5, 3);
  return {{"moment", {moment, 15, 0, {}, {}}},
          {"moment and ridge", {moment, 15, 0.5, {}, {}}},
          {"moment and cache", {moment, 15, 0, extra, {}}},
          {"moment and earlier keys", {moment, 15, 0, {}, previous}},
          {"all", {moment, 15, 0.5, extra, previous}},
          {"ridge", {SecondMoment(), 1, 10, {}, {}}},
          {"ridge and earlier keys", {SecondMoment(), 1, 10, {}, previous}},
          {"ridge and cache", {SecondMoment(), 1, 10, extra, {}}}};
}

TEST(Solver, BothFormsEqualEigen) {
  for (const int64_t edits : {1, 7, 40, 90}) {
    const at::Tensor keys = random_matrix(40, edits, 10 + static_cast<uint64_t>(edits));
    for (const auto& [name, preserved] : cases(40)) {
      const at::Tensor expected = eigen_solve(preserved.matrix(at::kDouble, keys), keys);
      for (const auto method : {SolveMethod::kDense, SolveMethod::kPushThrough, SolveMethod::kAuto}) {
        const at::Tensor got = editors::solve_keys(keys, preserved, with(method));
        EXPECT_LT(relative_difference(got, expected), 1e-10)
            << name << ", " << edits << " edits, method " << static_cast<int>(method);
      }
    }
  }
}

TEST(Solver, SatisfiesItsOwnSystem) {
  const at::Tensor keys = random_matrix(30, 4, 5);
  const Preserved preserved{SecondMoment(random_spd(30, 6)), 3, 0.1, {}, {}};
  const at::Tensor solution = editors::solve_keys(keys, preserved);
  const at::Tensor system = preserved.matrix(at::kDouble, keys) + keys.mm(keys.t());
  EXPECT_LT(relative_difference(system.mm(solution), keys), 1e-12);
  EXPECT_LT(
      relative_difference(preserved.matrix(at::kDouble, keys).mm(editors::solve_preserved(keys, preserved)), keys),
      1e-12);
}

TEST(Solver, LimitsOfLambda) {
  const at::Tensor keys = random_matrix(30, 4, 5), residual = random_matrix(9, 4, 6);
  const SecondMoment moment(random_spd(30, 7));
  // A tiny weight interpolates: ΔW·K = R. A huge one changes nothing.
  const at::Tensor free = residual.mm(editors::solve_keys(keys, {moment, 1e-10, 0, {}, {}}).t());
  EXPECT_LT(relative_difference(free.mm(keys), residual), 1e-7);
  const at::Tensor frozen = residual.mm(editors::solve_keys(keys, {moment, 1e12, 0, {}, {}}).t());
  EXPECT_LT(frozen.norm().item<double>(), 1e-8);
}

TEST(Solver, EqualKeysShareTheirResidual) {
  const at::Tensor key = random_matrix(30, 1, 5), residual = random_matrix(9, 2, 6);
  const Preserved preserved{SecondMoment(random_spd(30, 7)), 1e-6, 0, {}, {}};
  for (const auto method : {SolveMethod::kDense, SolveMethod::kPushThrough}) {
    const at::Tensor delta = residual.mm(editors::solve_keys(at::cat({key, key}, 1), preserved, with(method)).t());
    EXPECT_LT(relative_difference(delta.mm(key), residual.mean(1, true)), 1e-4);
  }
}

TEST(Solver, ChoosesByCostAndKeepsTheFactor) {
  const testing::TemporaryFolder folder("solver_factor");
  SecondMoment moment(random_spd(64, 8));
  moment.keep_factor_at(folder / "factor.safetensors", "key", 1);
  const at::Tensor few = random_matrix(64, 2, 1), many = random_matrix(64, 640, 2);
  editors::SolveReport report;
  (void)editors::solve_keys(few, {moment, 1, 0, {}, {}}, {}, &report);
  EXPECT_EQ(report.method, "push-through");
  EXPECT_GT(report.condition, 1);
  EXPECT_TRUE(std::filesystem::exists(folder / "factor.safetensors")) << "solve_keys took it from the moment";
  const SecondMoment copy = moment;
  EXPECT_TRUE(copy.factor(at::kDouble, few).lower_FF().is_same(moment.factor(at::kDouble, few).lower_FF()))
      << "copies share the factor";
  (void)editors::solve_keys(many, {moment, 1, 0, {}, {}}, {}, &report);
  EXPECT_EQ(report.method, "dense");
  // A process that goes on from a checkpoint has no factor yet, and chooses as the one that had.
  for (const int64_t n : {12, 16, 20, 24}) {
    const at::Tensor keys = random_matrix(64, n, 3);
    editors::SolveReport fresh;
    const auto here = editors::solve_keys(keys, {moment, 1, 0, {}, {}}, {}, &report);
    const auto there = editors::solve_keys(keys, {SecondMoment(random_spd(64, 8)), 1, 0, {}, {}}, {}, &fresh);
    EXPECT_EQ(report.method, fresh.method) << n;
    EXPECT_EQ(report.condition, fresh.condition) << n;
    EXPECT_TRUE(at::equal(here, there)) << n;
  }
}

TEST(Solver, SinglePrecisionComesClose) {
  const at::Tensor keys = random_matrix(40, 6, 3);
  const Preserved preserved{SecondMoment(random_spd(40, 4)), 2, 0, {}, {}};
  const at::Tensor exact = editors::solve_keys(keys, preserved);
  for (const auto method : {SolveMethod::kDense, SolveMethod::kPushThrough}) {
    const at::Tensor single = editors::solve_keys(keys, preserved, with(method, at::kFloat));
    EXPECT_EQ(single.scalar_type(), at::kFloat);
    EXPECT_LT(relative_difference(single, exact), 1e-4);
  }
}

TEST(Solver, SaysWhatIsWrong) {
  const at::Tensor keys = random_matrix(20, 3, 1);
  const at::Tensor thin = random_matrix(20, 4, 2);
  const SecondMoment negative(random_spd(20, 3) - 5 * at::eye(20, at::kDouble));
  expect_error(ErrorClass::kNumeric, {"stats_tokens"}, [&] {
    (void)editors::solve_keys(keys, {negative, 1, 0, {}, {}});
  });
  expect_error(ErrorClass::kInvalidArgument, {"width 20"}, [&] {
    (void)editors::solve_keys(keys, {SecondMoment(random_spd(8, 1)), 1, 0, {}, {}});
  });
  at::Tensor broken = keys.clone();
  broken[3][1] = std::nan("");
  expect_error(ErrorClass::kNumeric, {"NaN"}, [&] {
    (void)editors::solve_keys(broken, {SecondMoment(random_spd(20, 1)), 1, 0, {}, {}});
  });
  expect_error(ErrorClass::kInvalidArgument, {"not square"}, [&] { (void)SecondMoment(thin); });
}

TEST(Solver, AlmostSingularGetsALittleJitterAndSaysSo) {
  // Rank 10 of 20, as from too few tokens: rounding makes some eigenvalues slightly negative.
  const at::Tensor thin = random_matrix(20, 10, 2);
  const at::Tensor singular = thin.mm(thin.t());
  const SpdFactor factor = SpdFactor::of(singular - 1e-15 * at::eye(20, at::kDouble));
  EXPECT_GT(factor.jitter(), 0);
  EXPECT_LT(factor.jitter(), 1e-8 * singular.diagonal().mean().item<double>());
  EXPECT_EQ(SpdFactor::of(random_spd(20, 1)).jitter(), 0);
}

// MEMIT of 10,000 facts at F = 16,384 is this with larger numbers: C and one more F×F matrix.
TEST(Solver, HoldsOneMatrixBesideTheMoment) {
  const int64_t width = 200, edits = 120;
  const SecondMoment moment(random_spd(width, 1));
  const at::Tensor keys_FE = random_matrix(width, edits, 2);
  const int64_t square = width * width * 8, wide = width * edits * 8;
  for (const auto method : {SolveMethod::kDense, SolveMethod::kPushThrough}) {
    const auto counter = std::make_shared<AllocationCounter>();
    {
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
      (void)editors::solve_keys(keys_FE, {moment, 15000, 0, {}, {}}, with(method));
    }
    EXPECT_GE(counter->peak(), square) << "the counter counts";
    EXPECT_LT(counter->peak(), square + 4 * wide + edits * edits * 8 * 4) << static_cast<int>(method);
  }
  // With everything that can be in a system: still one.
  const auto counter = std::make_shared<AllocationCounter>();
  const Preserved all{moment, 15, 0.5, random_spd(width, 2, 0), random_matrix(width, 5, 3)};
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
    (void)editors::solve_keys(keys_FE, all, with(SolveMethod::kDense));
  }
  EXPECT_LT(counter->peak(), square + 4 * wide);
}

TEST(SpdFactor, OverwritesWhatItWasBuiltFrom) {
  const at::Tensor matrix_FF = random_spd(30, 5), rhs_FE = random_matrix(30, 4, 6);
  int built = 0;
  const auto factor = SpdFactor::of_built(
      [&] {
        ++built;
        return matrix_FF.clone();
      },
      at::kDouble, "matrix");
  EXPECT_EQ(built, 1);
  EXPECT_LT(relative_difference(matrix_FF.mm(factor.solve(rhs_FE)), rhs_FE), 1e-12);
  // Singular: built again with a little added.
  const at::Tensor thin = random_matrix(30, 10, 7), flat = thin.mm(thin.t());
  flat[3].zero_();
  flat.select(1, 3).zero_();
  built = 0;
  const auto shifted = SpdFactor::of_built(
      [&] {
        ++built;
        return flat.clone();
      },
      at::kDouble, "matrix");
  EXPECT_GT(shifted.jitter(), 0);
  EXPECT_GE(built, 2);
  EXPECT_THROW((void)SpdFactor::of_built([&] { return -matrix_FF; }, at::kDouble, "matrix"), Error);
}

}  // namespace solver_test
}  // namespace emend
