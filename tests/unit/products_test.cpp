// Products through oneDNN beside at::linear's.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/kernels.h>
#include <emend/devices/route.h>
#include <emend/devices/simulated.h>
#include <emend/editors/steps/statistics.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/checkpoint.h>
#include <emend/models/detail/dot_products.h>
#include <emend/models/products.h>
#include <emend/models/published_shapes.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "support/editor_models.h"

namespace emend {
namespace products_test {

using devices::PlainOperators;
using models::product;
using testing::relative_difference;

struct Operands {
  at::Tensor x_NI, weight_OI, bias_O;
};

// Large enough for oneDNN.
Operands large_operands(int64_t rows = 96) {
  at::manual_seed(7);
  return {at::randn({rows, 192}), at::randn({640, 192}), at::randn({640})};
}

TEST(Products, AgreeWithFloat64) {
  for (const int64_t rows : {1, 2, 4, 37, 63, 96, 700}) {
    const auto [x, weight, bias] = large_operands(rows);
    for (const at::Tensor& added : {at::Tensor(), bias}) {
      const at::Tensor want = at::linear(x.to(at::kDouble), weight.to(at::kDouble),
                                         added.defined() ? std::optional(added.to(at::kDouble)) : std::nullopt);
      EXPECT_LT(relative_difference(product(x, weight, added), want), 1e-6);
      // A transposed view, as GPT-2 keeps its matrices.
      EXPECT_LT(relative_difference(product(x, weight.t().contiguous().t(), added), want), 1e-6);
    }
  }
}

// Row by row and output by output, whatever else is computed.
TEST(DotProducts, AgreeWithFloat64AndDoNotDependOnEachOther) {
  at::manual_seed(11);
  for (const int64_t d : {1, 7, 8, 31, 64, 100})
    for (int64_t n = 1; n <= 9; ++n)
      for (int64_t count = 1; count <= 7; ++count) {
        const at::Tensor x = at::randn({n, d}), all = at::randn({count, d + 3}), matrix = all.narrow(1, 0, d);
        const auto products = [&](int64_t first, int64_t rows, int64_t begin, int64_t end) {
          at::Tensor y = at::full({rows, end - begin}, 77.0F);
          models::detail::dot_products(matrix[begin].const_data_ptr<float>(), d + 3, end - begin,
                                       x[first].const_data_ptr<float>(), rows, d, end - begin,
                                       y.mutable_data_ptr<float>());
          return y;
        };
        const at::Tensor y = products(0, n, 0, count);
        EXPECT_LT(relative_difference(y, x.to(at::kDouble).mm(matrix.to(at::kDouble).t())), 1e-6);
        EXPECT_TRUE(products(n - 1, 1, 0, count).equal(y.narrow(0, n - 1, 1)));
        EXPECT_TRUE(products(0, n, count - 1, count).equal(y.narrow(1, count - 1, 1)));
      }
}

// oneDNN's answer to a layout that it has no code for is a loop a hundred times slower.
TEST(Products, AreFastWhateverTheLayout) {
  at::manual_seed(3);
  const at::Tensor wide = at::randn({512, 1024}), weight = at::randn({512, 1024});
  const auto seconds = [](const at::Tensor& x, const at::Tensor& w) {
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
      const auto start = std::chrono::steady_clock::now();
      (void)product(x, w);
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
  };
  const at::Tensor x = wide.narrow(1, 0, 512), w = weight.narrow(1, 0, 512);
  const double plain = seconds(x.contiguous(), w.contiguous());
  for (const at::Tensor& input : {x, x.t(), x.contiguous().t(), x[0].expand({512, 512})})
    for (const at::Tensor& matrix : {w, w.t(), w.contiguous().t()}) {
      EXPECT_LT(relative_difference(product(input, matrix), input.to(at::kDouble).mm(matrix.to(at::kDouble).t())),
                1e-6);
      EXPECT_LT(seconds(input, matrix), 20 * plain + 0.01);
    }
}

TEST(Products, HandTheGradientOfTheInputBack) {
  const auto [x, weight, bias] = large_operands();
  const at::Tensor leaf = x.clone().requires_grad_(true), seed = at::randn({96, 640});
  const at::AutoGradMode with_grad(true);
  const auto grads = torch::autograd::grad({product(leaf, weight, bias)}, {leaf}, {seed});
  EXPECT_LT(relative_difference(grads[0], seed.to(at::kDouble).mm(weight.to(at::kDouble))), 1e-6);
}

TEST(Products, HandGradientsOfWeightAndBiasBack) {
  const auto [x, weight, bias] = large_operands();
  const at::Tensor w = weight.clone().requires_grad_(true), b = bias.clone().requires_grad_(true);
  const at::Tensor seed = at::randn({96, 640});
  const at::AutoGradMode with_grad(true);
  const auto grads = torch::autograd::grad({product(x, w, b)}, {w, b}, {seed});
  EXPECT_LT(relative_difference(grads[0], seed.t().mm(x)), 1e-6);
  EXPECT_LT(relative_difference(grads[1], seed.sum(0)), 1e-6);
}

TEST(Products, ArePlainOnRequestAndWhereTheyAreSmall) {
  const auto [x, weight, bias] = large_operands();
  {
    const devices::PlainOperators plain;
    EXPECT_TRUE(product(x, weight, bias).equal(at::linear(x, weight, bias)));
    const devices::PlainOperators no_change(false);
    EXPECT_TRUE(product(x, weight, bias).equal(at::linear(x, weight, bias)));
  }
  const at::Tensor few = x.narrow(0, 0, 3), small = weight.narrow(0, 0, 80), of_small = bias.narrow(0, 0, 80);
  EXPECT_TRUE(product(few, small, of_small).equal(at::linear(few, small, of_small)));
  const at::Tensor wide = x.to(at::kDouble), wide_weight = weight.to(at::kDouble);
  EXPECT_TRUE(product(wide, wide_weight).equal(at::linear(wide, wide_weight)));
}

// Where the processor has no instruction for them LibTorch's own loop takes some thirty times as long.
TEST(Products, OfHalfPrecisionAreRoundedOnceAndTakeNoAge) {
  const auto [x, weight, bias] = large_operands();
  const auto seconds = [](const auto& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const double plain = seconds([&] { (void)product(x, weight, bias); });
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor leaf = x.to(dtype).requires_grad_(true), w = weight.to(dtype), b = bias.to(dtype);
    const at::Tensor seed = at::randn({96, 640}).to(dtype);
    const double rounding = dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
    const at::AutoGradMode with_grad(true);
    at::Tensor y, grad;
    const double taken = seconds([&] {
      y = product(leaf, w, b);
      grad = torch::autograd::grad({y}, {leaf}, {seed})[0];
    });
    EXPECT_EQ(y.scalar_type(), dtype);
    EXPECT_LT(relative_difference(y, leaf.to(at::kDouble).mm(w.to(at::kDouble).t()) + b.to(at::kDouble)), rounding);
    EXPECT_LT(relative_difference(grad, seed.to(at::kDouble).mm(w.to(at::kDouble))), rounding);
    if (!models::multiplies_bfloat16(c10::kCPU)) {
      EXPECT_LT(taken, 20 * plain + 0.02);
    }
  }
}

// The order changes which sums are added first, and nothing else; threads that share a weight get the same numbers.
TEST(PackedWeight, MultipliesAsTheWeightDoes) {
  if (!models::multiplies_bfloat16(c10::kCPU)) GTEST_SKIP() << "a processor that does not multiply bfloat16";
  const auto [x, weight, bias] = large_operands();
  const at::Tensor w = weight.to(at::kBFloat16), b = bias.to(at::kBFloat16),
                   seed = at::randn({96, 640}).to(at::kBFloat16);
  const at::Tensor exact = x.to(at::kBFloat16).to(at::kDouble).mm(w.to(at::kDouble).t()) + b.to(at::kDouble);
  for (const at::Tensor& stored : {w, w.t().contiguous().t()}) {
    const auto packed = models::PackedWeight::of(stored);
    ASSERT_NE(packed, nullptr);
    EXPECT_LT(relative_difference(packed->product(x.to(at::kBFloat16), b), exact), 0x1p-8);
    const at::AutoGradMode with_grad(true);
    const at::Tensor leaf = x.to(at::kBFloat16).requires_grad_(true);
    const int64_t before = models::linear_flops();
    const at::Tensor y = packed->product(leaf, b);
    EXPECT_EQ(models::linear_flops() - before, 2 * 2 * 96 * 192 * 640);
    EXPECT_LT(relative_difference(y, exact), 0x1p-8);
    const at::Tensor grad = torch::autograd::grad({y}, {leaf}, {seed})[0];
    EXPECT_LT(relative_difference(grad, seed.to(at::kDouble).mm(w.to(at::kDouble))), 0x1p-8);
    EXPECT_EQ(packed->product(leaf.detach().narrow(0, 0, 0), b).sizes(), (at::IntArrayRef{0, 640})) << "no rows";
  }
  const auto shared = models::PackedWeight::of(w);
  std::vector<at::Tensor> each(4);
  std::vector<std::thread> threads;
  for (auto& one : each) threads.emplace_back([&, x = x] { one = shared->product(x.to(at::kBFloat16), {}); });
  for (auto& thread : threads) thread.join();
  for (const auto& one : each) EXPECT_TRUE(one.equal(each[0]));
}

TEST(PackedWeight, IsForLargeMatricesInBfloat16) {
  const auto [x, weight, bias] = large_operands();
  EXPECT_EQ(models::PackedWeight::of(weight), nullptr) << "float32";
  EXPECT_EQ(models::PackedWeight::of(weight.to(at::kBFloat16).narrow(0, 0, 8)), nullptr) << "small";
  EXPECT_EQ(models::PackedWeight::of({}), nullptr);
}

TEST(Products, AreTheSameOnASimulatedDevice) {
  devices::enable_simulated_devices(1);
  const auto [x, weight, bias] = large_operands();
  const auto on_device = [](const at::Tensor& t) {
    return devices::route_to(t, c10::Device(devices::kSimulated, 0), devices::Purpose::kOther);
  };
  const at::Tensor y = product(on_device(x), on_device(weight), on_device(bias));
  EXPECT_EQ(y.device(), c10::Device(devices::kSimulated, 0));
  EXPECT_TRUE(devices::to_host(y).equal(product(x, weight, bias)));
}

TEST(Products, CountTheirArithmetic) {
  const auto [x, weight, bias] = large_operands();
  const int64_t before = models::linear_flops();
  (void)product(x, weight, bias);
  EXPECT_EQ(models::linear_flops() - before, 2 * 96 * 192 * 640);
  const at::AutoGradMode with_grad(true);
  (void)product(x.clone().requires_grad_(true), weight, bias);
  EXPECT_EQ(models::linear_flops() - before, 3 * 2 * 96 * 192 * 640);
}

// Wide enough that the sums are added block by block.
TEST(Products, SumsOfBlocksAreTheWholeSecondMoment) {
  const auto config = models::published_shape("smollm2-135m", 1);
  const models::Model model = models::load_model(models::random_weights(config, "one layer", 3));
  std::vector<std::vector<int64_t>> rows;
  for (int64_t r = 0; r < 8; ++r)
    for (rows.emplace_back(); rows.back().size() < 20 + static_cast<size_t>(r);)
      rows.back().push_back(static_cast<int64_t>(rows.back().size()) * 31 % 49152);
  const auto moment_FF = editors::collect_second_moments(model, rows, {0}, {}).at(0).cov_FF();
  hooks::HookSession session(model.hooks());
  session.capture({hooks::Site::kMlpDownIn, 0}).attach();
  (void)model.forward(models::TokenBatch::from_rows(rows));
  const at::Tensor keys_NF = session.captured({hooks::Site::kMlpDownIn, 0}).to(at::kDouble);
  EXPECT_LT(relative_difference(moment_FF, keys_NF.t().mm(keys_NF) / keys_NF.size(0)), 1e-6);
  EXPECT_TRUE(moment_FF.equal(moment_FF.t()));
}

}  // namespace products_test
}  // namespace emend
