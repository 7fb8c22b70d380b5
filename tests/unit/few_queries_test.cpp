// Attention of few queries against the formula written out in float64 and against LibTorch's.
#include <ATen/ATen.h>
#include <emend/devices/kernels.h>
#include <emend/models/detail/attention.h>
#include <emend/models/detail/few_queries.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

namespace emend::models::detail {
namespace few_queries_test {

struct Case {
  int64_t rows, heads, groups, queries, keys, width;
};

at::Tensor written_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
                       double scale) {
  const int64_t repeat = q.size(1) / k.size(1);
  const auto wide = [&](const at::Tensor& x) { return x.to(at::kDouble).repeat_interleave(repeat, 1); };
  at::Tensor scores = q.to(at::kDouble).matmul(wide(k).transpose(-1, -2)) * scale;
  if (mask.defined()) scores = scores + mask.to(at::kDouble);
  return at::softmax(scores, -1).matmul(wide(v));
}

/// A part of a longer cache: neither keys nor values are without gaps.
at::Tensor part_of_a_cache(const Case& one, at::ScalarType dtype) {
  return at::randn({one.rows, one.groups, one.keys + 5, one.width}, at::kFloat).to(dtype).narrow(2, 3, one.keys);
}

TEST(FewQueries, AgreeWithTheFormula) {
  at::manual_seed(3);
  for (const Case& one : {Case{2, 9, 3, 1, 130, 64}, Case{3, 4, 4, 8, 7, 24}, Case{1, 8, 1, 3, 64, 8},
                          Case{5, 6, 2, 2, 65, 80}, Case{1, 2, 2, 1, 1, 256}})
    for (const auto dtype : {at::kFloat, at::kBFloat16})
      for (const int masked : {0, 1, 2}) {
        const at::Tensor q = at::randn({one.rows, one.heads, one.queries, one.width}, at::kFloat).to(dtype);
        const at::Tensor k = part_of_a_cache(one, dtype), v = part_of_a_cache(one, dtype);
        at::Tensor mask;
        if (masked > 0) {
          mask = at::zeros(
              {masked == 1 ? 1 : one.rows, masked == 1 ? 1 : one.heads, masked == 1 ? one.queries : 1, one.keys},
              at::kFloat);
          if (one.keys > 1) mask.narrow(3, one.keys / 2, 1).fill_(-std::numeric_limits<float>::infinity());
          mask = mask.to(dtype);
        }
        ASSERT_TRUE(takes_few_queries(q, k, v));
        const at::Tensor is = attend_few(q, k, v, mask, 0.3), shall = written_out(q, k, v, mask, 0.3);
        EXPECT_EQ(is.scalar_type(), dtype);
        const double rounding = dtype == at::kFloat ? 2e-6 : 1.0 / 256;
        EXPECT_LT((is.to(at::kDouble) - shall).abs().max().item<double>(), rounding * shall.abs().max().item<double>())
            << one.keys << " keys of " << one.width << ", mask " << masked;
        const at::Tensor library = at::scaled_dot_product_attention(
            q.to(at::kFloat), k.to(at::kFloat), v.to(at::kFloat),
            mask.defined() ? std::optional(mask.to(at::kFloat)) : std::nullopt, 0.0, false, 0.3, /*enable_gqa=*/true);
        EXPECT_LT((is.to(at::kFloat) - library).abs().max().item<double>(),
                  2 * rounding * shall.abs().max().item<double>());
      }
}

TEST(FewQueries, WhatElseIsInTheBatchChangesNothing) {
  at::manual_seed(4);
  const at::Tensor q = at::randn({6, 9, 2, 64}), k = at::randn({6, 3, 100, 64}), v = at::randn({6, 3, 100, 64});
  const at::Tensor all = attend_few(q, k, v, {}, 0.125);
  for (int64_t row = 0; row < 6; ++row) {
    const auto alone = [&](const at::Tensor& x) { return x.narrow(0, row, 1); };
    EXPECT_TRUE(at::equal(attend_few(alone(q), alone(k), alone(v), {}, 0.125), alone(all))) << row;
  }
}

TEST(FewQueries, HaveTheGradientsOfTheFormula) {
  at::manual_seed(6);
  for (const Case& one : {Case{2, 9, 3, 13, 31, 64}, Case{3, 4, 4, 8, 7, 24}, Case{1, 8, 1, 3, 64, 8},
                          Case{2, 6, 2, 64, 80, 80}, Case{1, 2, 2, 1, 1, 16}})
    for (const auto dtype : {at::kFloat, at::kBFloat16})
      for (const bool masked : {false, true}) {
        const at::Tensor q = at::randn({one.rows, one.queries, one.heads, one.width}, at::kFloat).to(dtype);
        std::vector<at::Tensor> leaves = {q.transpose(1, 2), part_of_a_cache(one, dtype), part_of_a_cache(one, dtype)};
        at::Tensor mask;
        if (masked) {
          mask = at::zeros({one.rows, 1, one.queries, one.keys}, dtype);
          if (one.keys > 1) mask.narrow(3, one.keys / 2, 1).fill_(-std::numeric_limits<float>::infinity());
        }
        const at::Tensor weight = at::randn({one.rows, one.heads, one.queries, one.width});
        const auto results = [&](at::ScalarType as, const auto& attend_as) {
          std::vector<at::Tensor> in;
          for (const auto& x : leaves) in.push_back(x.to(as).detach().requires_grad_());
          const at::Tensor out = attend_as(in[0], in[1], in[2]);
          auto all = torch::autograd::grad({(out * weight.to(as)).sum()}, in);
          all.push_back(out.detach());
          return all;
        };
        const auto is = results(dtype, [&](const auto& q_, const auto& k, const auto& v) {
          EXPECT_TRUE(takes_few_queries(q_, k, v));
          return attend_few(q_, k, v, mask, 0.3);
        });
        const auto shall = results(at::kDouble, [&](const auto& q_, const auto& k, const auto& v) {
          return written_out(q_, k, v, mask, 0.3);
        });
        for (size_t i = 0; i < is.size(); ++i) {
          EXPECT_EQ(is[i].scalar_type(), dtype);
          const double largest = shall[i].abs().max().item<double>(), rounding = dtype == at::kFloat ? 4e-6 : 1.0 / 100;
          EXPECT_LE((is[i].to(at::kDouble) - shall[i]).abs().max().item<double>(), rounding * largest + 1e-7)
              << i << ", " << one.keys << " keys of " << one.width << ", mask " << masked;
        }
      }
}

TEST(FewQueries, TakeGradientsOfAnyLayout) {
  at::manual_seed(7);
  std::vector<at::Tensor> in = {at::randn({2, 6, 5, 16}), at::randn({2, 3, 9, 16}), at::randn({2, 3, 9, 16})};
  for (auto& x : in) x.requires_grad_();
  const auto gradients = [&](const at::Tensor& out, const at::Tensor& grad) {
    return torch::autograd::grad({out}, in, {grad.to(out.scalar_type())});
  };
  const at::Tensor one = at::ones({1, 1, 1, 1}).expand({2, 6, 5, 16}),
                   turned = at::randn({2, 6, 16, 5}).transpose(2, 3);
  for (const at::Tensor& grad : {one, turned}) {
    const auto is = gradients(attend_few(in[0], in[1], in[2], {}, 0.3), grad);
    const auto shall = gradients(written_out(in[0], in[1], in[2], {}, 0.3), grad);
    for (size_t i = 0; i < is.size(); ++i) EXPECT_TRUE(at::allclose(is[i], shall[i], 1e-4, 1e-5)) << i;
  }
}

TEST(FewQueries, AreTakenInRunsWhereTheirScoresWouldBeMany) {
  at::manual_seed(5);
  const at::Tensor q = at::randn({2, 6, 8, 32}), k = at::randn({2, 3, 50, 32}), v = at::randn({2, 3, 50, 32});
  EXPECT_TRUE(at::equal(attend(q, k, v, {}, 0.2, 0, /*scores_at_once=*/3 * 2 * 6 * 50), attend_few(q, k, v, {}, 0.2)));
}

TEST(FewQueries, OthersGoAnotherWay) {
  const at::Tensor few = at::randn({1, 2, 8, 16}), many = at::randn({1, 2, 9, 16}), k = at::randn({1, 2, 30, 16});
  EXPECT_TRUE(takes_few_queries(few, k, k));
  EXPECT_FALSE(takes_few_queries(many, k, k));
  EXPECT_FALSE(takes_few_queries(few.to(at::kDouble), k, k)) << "double keeps its precision";
  EXPECT_FALSE(takes_few_queries(few, k.transpose(2, 3), k));
  EXPECT_TRUE(takes_few_queries(many.clone().requires_grad_(true), k, k)) << "a gradient is wanted";
  EXPECT_FALSE(takes_few_queries(at::randn({1, 2, 65, 16}).requires_grad_(true), k, k));
  const devices::PlainOperators plain;
  EXPECT_FALSE(takes_few_queries(few, k, k)) << "the reference engines do without";
}

}  // namespace few_queries_test
}  // namespace emend::models::detail
