// Every operator that an editor or a model uses gives the CPU's result, bit for bit, on a simulated device.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/simulated.h"

namespace emend {
namespace sim_operators_test {

using at::Tensor;
using testing::sim;
using Tensors = std::vector<Tensor>;

/// Puts a CPU tensor where the case is being run.
struct Place {
  c10::Device device;
  Tensor operator()(const Tensor& t) const { return t.to(device, t.scalar_type(), false, true); }
  [[nodiscard]] at::TensorOptions options() const { return at::TensorOptions().device(device); }
};

struct Case {
  const char* name;
  std::function<Tensors(const Place& on)> run;
};

Tensor random(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(c10::multiply_integers(shape)));
  return at::randn(shape, generator, at::kFloat).to(dtype);
}
Tensor spd(int64_t n, at::ScalarType dtype = at::kDouble) {
  const auto a = random({n, n}, dtype);
  return a.mm(a.t()) + static_cast<double>(n) * at::eye(n, at::TensorOptions().dtype(dtype));
}
Tensors tuple(const std::tuple<Tensor, Tensor>& t) {
  return {std::get<0>(t), std::get<1>(t)};
}
Tensors tuple(const std::tuple<Tensor, Tensor, Tensor>& t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t)};
}
Tensor longs(std::vector<int64_t> values) {
  return at::tensor(values, at::kLong);
}

/// Attention forward and backward; `mask` may be undefined.
Tensors attention(const Place& on, const Tensor& mask, bool causal, at::ScalarType dtype = at::kFloat) {
  Tensors qkv;
  for (int i = 0; i < 3; ++i) qkv.push_back(on(random({2, 4, 7 + 0 * i, 16}, dtype) * (i + 1)).requires_grad_());
  const std::optional<Tensor> placed = mask.defined() ? std::optional<Tensor>(on(mask)) : std::nullopt;
  const auto out = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], placed, 0.0, causal);
  auto grads = torch::autograd::grad({out.to(at::kFloat).square().sum()}, qkv);
  grads.push_back(out);
  return grads;
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"to",
       [](const Place& on) {
         const auto x = on(random({8, 8}));
         return Tensors{x, x.to(at::kDouble), x.to(at::kBFloat16)};
       }},
      {"arithmetic",
       [](const Place& on) {
         const auto x = on(random({8, 8}));
         return Tensors{x + x, x * 2 + 1, x - x.t(), x / (x.abs() + 1), 2 / (x.abs() + 1)};
       }},
      {"host_scalar",
       [](const Place& on) {
         const auto x = on(random({8, 8}));
         const auto c = at::scalar_tensor(3.0);
         return Tensors{x * c, c * x, at::where(x > 0, x, c)};
       }},
      {"promotion",
       [](const Place& on) {
         const auto x = on(random({4}));
         return Tensors{x + on(longs({1, 2, 3, 4})), on(longs({1, 2})) * 2.5, x.to(at::kBFloat16) + x};
       }},
      {"in_place",
       [](const Place& on) {
         auto x = on(random({8, 8}));
         x.add_(1).mul_(2).sub_(x).clamp_(-1, 1);
         x.slice(0, 1, 3).add_(5);
         x.select(1, 2).zero_();
         x.t().fill_diagonal_(7);
         return Tensors{x};
       }},
      {"views",
       [](const Place& on) {
         const auto x = on(random({4, 6}));
         x.view({2, 12}).select(0, 1).zero_();
         return Tensors{x,
                        x.permute({1, 0}),
                        x.unsqueeze(1).expand({4, 3, 6}),
                        x.narrow(1, 2, 3),
                        x.as_strided({2, 2}, {3, 1}, 1),
                        x.unfold(1, 2, 2),
                        x.diagonal()};
       }},
      {"copies",
       [](const Place& on) {
         const auto x = on(random({4, 6}));
         return Tensors{x.clone(),        x.t().contiguous(),        x.t().reshape({-1}), x.flip({0}),
                        x.repeat({2, 1}), x.repeat_interleave(2, 0), x.roll(1, 0)};
       }},
      {"split",
       [](const Place& on) {
         auto parts = on(random({8, 6})).split(3);
         const auto more = on(random({8, 6})).chunk(2, 1);
         parts.insert(parts.end(), more.begin(), more.end());
         for (const auto& t : on(random({3, 4})).unbind(0)) parts.push_back(t);
         return parts;
       }},
      {"join",
       [](const Place& on) {
         const auto x = on(random({4, 6}));
         return Tensors{at::cat({x, x}), at::stack({x, x}, 1), at::cat({x, x}, 1), at::constant_pad_nd(x, {1, 2}, 3)};
       }},
      {"index",
       [](const Place& on) {
         const auto x = on(random({8, 8}));
         const auto i = longs({1, 3, 1});
         return Tensors{x.index({on(i)}),
                        x.index({i}),
                        x.index_select(1, on(i)),
                        x.index({on(i), on(i)}),
                        x.gather(1, on(at::randint(0, 8, {8, 2}, at::kLong).fill_(3))),
                        x.take(on(i))};
       }},
      {"index_put",
       [](const Place& on) {
         auto x = on(random({8, 8}));
         x.index_put_({on(longs({1, 3}))}, on(at::ones({2, 8})));
         x.index_put_({on(longs({2, 2}))}, on(at::ones({2, 8})), true);
         x.index_put_({on(longs({5}))}, at::scalar_tensor(4.F));
         return Tensors{x};
       }},
      {"index_add",
       [](const Place& on) {
         auto x = on(random({8, 8}));
         x.index_add_(0, on(longs({1, 3, 1})), on(random({3, 8})), 0.5);
         x.index_copy_(1, on(longs({2})), on(random({8, 1})));
         x.index_fill_(0, on(longs({4})), 2.0);
         return Tensors{x};
       }},
      {"scatter",
       [](const Place& on) {
         auto x = on(random({4, 8}));
         x.scatter_(1, on(longs({1, 0, 3, 2}).unsqueeze(1)), 9.0);
         x.scatter_add_(1, on(longs({1, 1, 1, 1}).unsqueeze(1)), on(random({4, 1})));
         return Tensors{x, x.scatter(0, on(longs({2}).view({1, 1})), on(random({1, 1}))),
                        x.scatter_reduce(0, on(longs({0}).view({1, 1})), on(random({1, 1})), "amax")};
       }},
      {"masks",
       [](const Place& on) {
         const auto x = on(random({8, 8}));
         return Tensors{x > 0,
                        at::where(x > 0, x, at::zeros_like(x)),
                        x.masked_fill(x > 0, 1.0),
                        x.masked_select(x > 0),
                        (x > 0).nonzero(),
                        x.tril(),
                        x.triu(1),
                        x.isfinite(),
                        (x > 0).logical_and(x < 1)};
       }},
      {"matmul",
       [](const Place& on) {
         const auto x = on(random({8, 8})), b = on(random({2, 4, 8}));
         return Tensors{x.mm(x),
                        b.matmul(x),
                        b.bmm(b.transpose(1, 2)),
                        at::addmm(x, x, x, 0.5, 2),
                        at::baddbmm(b.bmm(b.transpose(1, 2)), b, b.transpose(1, 2)),
                        at::outer(x[0], x[1]),
                        x.mv(x[0]),
                        x[0].dot(x[1]),
                        at::einsum("bij,kj->bik", {b, x})};
       }},
      {"linear",
       [](const Place& on) {
         const auto b = on(random({2, 4, 8})), w = on(random({5, 8})), c = on(random({5}));
         return Tensors{at::linear(b, w), at::linear(b, w, c),
                        at::linear(b.to(at::kBFloat16), w.to(at::kBFloat16), c.to(at::kBFloat16))};
       }},
      {"rank_one_update",
       [](const Place& on) {
         auto w = on(random({6, 8}));
         w.addr_(on(random({6})), on(random({8})));
         w.addmm_(on(random({6, 2})), on(random({2, 8})));
         return Tensors{w};
       }},
      {"double_products",
       [](const Place& on) {
         const auto x = on(random({16, 8}, at::kDouble));
         auto c = on(at::zeros({8, 8}, at::kDouble));
         c.addmm_(x.t(), x);
         return Tensors{c, x.t().mm(x)};
       }},
      {"bfloat16",
       [](const Place& on) {
         const auto x = on(random({8, 8}, at::kBFloat16));
         return Tensors{x.mm(x), x + x, x.softmax(-1), x.sum(),
                        x.to(at::kFloat).mm(x.to(at::kFloat)).to(at::kBFloat16)};
       }},
      {"reductions",
       [](const Place& on) {
         const auto x = on(random({8, 8}));
         return Tensors{x.sum(),
                        x.sum({0}),
                        x.mean({1}, true),
                        x.norm(),
                        at::linalg_vector_norm(x, 2, {0}),
                        x.amax({1}),
                        x.argmax(-1),
                        x.cumsum(1),
                        x.var({0}),
                        x.prod(),
                        x.abs().max(),
                        at::logsumexp(x, {1}),
                        (x > 0).any(),
                        (x > 0).all()};
       }},
      {"sorting",
       [](const Place& on) {
         const auto x = on(random({8, 8}));
         auto out = tuple(x.topk(3));
         for (const auto& t : tuple(x.sort(1, true))) out.push_back(t);
         for (const auto& t : tuple(x.max(1))) out.push_back(t);
         out.push_back(x.argsort());
         out.push_back(at::searchsorted(on(at::arange(5, at::kFloat)), x));
         return out;
       }},
      {"activations",
       [](const Place& on) {
         const auto x = on(random({8, 8}));
         return Tensors{
             at::gelu(x), at::gelu(x, "tanh"), at::silu(x),     at::relu(x), x.tanh(), x.sigmoid(), at::glu(x),
             x.exp(),     x.abs().log(),       x.abs().rsqrt(), x.pow(3),    x.sin(),  x.cos()};
       }},
      {"norms",
       [](const Place& on) {
         const auto x = on(random({4, 8})), w = on(random({8})), b = on(random({8}));
         return Tensors{at::layer_norm(x, {8}, w, b, 1e-5), at::rms_norm(x, {8}, w, 1e-6),
                        at::rms_norm(x.to(at::kBFloat16), {8}, w.to(at::kBFloat16), 1e-6)};
       }},
      {"softmax",
       [](const Place& on) {
         const auto x = on(random({4, 8}));
         return Tensors{x.softmax(-1), x.log_softmax(-1), at::kl_div(x.log_softmax(-1), x.softmax(-1)),
                        at::cross_entropy_loss(x, on(longs({0, 3, 7, 1}))),
                        at::nll_loss(x.log_softmax(-1), on(longs({0, -100, 7, 1})))};
       }},
      {"embedding",
       [](const Place& on) {
         return Tensors{at::embedding(on(random({10, 4})), on(longs({1, 9, 1})))};
       }},
      {"cholesky",
       [](const Place& on) {
         const auto s = on(spd(8)), b = on(random({8, 3}, at::kDouble));
         const auto l = at::linalg_cholesky(s);
         auto out = tuple(at::linalg_cholesky_ex(s));
         out.push_back(at::cholesky_solve(b, l));
         out.push_back(at::linalg_solve_triangular(l, b, false));
         out.push_back(at::cholesky_inverse(l));
         return out;
       }},
      {"solve",
       [](const Place& on) {
         const auto s = on(spd(8)), b = on(random({8, 3}, at::kDouble));
         return Tensors{at::linalg_solve(s, b),
                        at::linalg_inv(s),
                        at::linalg_pinv(s),
                        std::get<0>(at::linalg_solve_ex(s, b)),
                        std::get<0>(at::linalg_lstsq(s, b, std::nullopt, "gels")),
                        at::linalg_det(s)};
       }},
      {"eigh_svd_qr",
       [](const Place& on) {
         const auto s = on(spd(8));
         auto out = tuple(at::linalg_eigh(s));
         for (const auto& t : tuple(at::linalg_svd(on(random({6, 4}, at::kDouble)), false))) out.push_back(t);
         for (const auto& t : tuple(at::linalg_qr(s))) out.push_back(t);
         out.push_back(at::linalg_eigvalsh(s));
         return out;
       }},
      {"out_variants",
       [](const Place& on) {
         const auto x = on(random({8, 8}));
         auto fresh = at::empty({0}, on.options()), wide = at::empty({3, 3}, on.options());
         at::mm_out(fresh, x, x);
         wide.resize_({8, 8});
         at::add_out(wide, x, x);
         auto part = at::zeros({8, 16}, on.options());
         auto left = part.narrow(1, 0, 8);
         at::mul_out(left, x, x);
         return Tensors{fresh, wide, part};
       }},
      {"factories",
       [](const Place& on) {
         const auto o = on.options();
         return Tensors{at::zeros({3}, o),
                        at::ones({2, 2}, o).tril(),
                        at::arange(5, o),
                        at::full({2}, 3.0, o),
                        at::eye(3, o),
                        at::linspace(0, 1, 5, o),
                        at::scalar_tensor(2.0, o),
                        at::tril_indices(3, 3, 0, o.dtype(at::kLong)),
                        at::tensor({1, 2, 3}, o.dtype(at::kLong)),
                        at::zeros_like(on(random({2}))),
                        on(random({2})).new_full({2}, 4)};
       }},
      {"foreach",
       [](const Place& on) {
         Tensors xs{on(random({4})), on(random({2, 2}))};
         at::_foreach_add_(xs, 1.0);
         at::_foreach_addcmul_(xs, xs, xs, 0.5);
         return xs;
       }},
      {"attention_causal", [](const Place& on) { return attention(on, {}, true); }},
      {"attention_plain", [](const Place& on) { return attention(on, {}, false); }},
      {"attention_float_mask",
       [](const Place& on) {
         return attention(on, at::full({7, 7}, -std::numeric_limits<float>::infinity()).triu(1).expand({2, 1, 7, 7}),
                          false);
       }},
      {"attention_bool_mask",
       [](const Place& on) {
         return attention(on, at::ones({7, 7}, at::kBool).tril(), false);
       }},
      {"attention_bfloat16", [](const Place& on) { return attention(on, {}, true, at::kBFloat16); }},
      {"attention_grouped",
       [](const Place& on) {
         const auto q = on(random({2, 4, 5, 8})), k = on(random({2, 2, 5, 8}));
         return Tensors{at::scaled_dot_product_attention(q, k, k, {}, 0.0, true, std::nullopt, true)};
       }},
      {"gradients",
       [](const Place& on) {
         const auto x = on(random({4, 8})).requires_grad_(), w = on(random({8})).requires_grad_();
         const auto y = at::rms_norm(at::silu(at::layer_norm(x, {8}, w)), {8}, w, 1e-6);
         return torch::autograd::grad({at::cross_entropy_loss(y, on(longs({0, 3, 7, 1})))}, {x, w});
       }},
      {"gradient_of_indexing",
       [](const Place& on) {
         const auto d = on(random({3, 8})).requires_grad_();
         auto h = on(random({3, 4, 8})).clone();
         h = h.index_add(1, on(longs({2})), d.unsqueeze(1));
         h = at::index_put(h, {on(longs({0, 1, 2})), on(longs({3, 0, 1}))}, d, true);
         return torch::autograd::grad({h.pow(2).sum()}, {d});
       }},
      {"gradient_through_solve",
       [](const Place& on) {
         const auto b = on(random({8, 2}, at::kDouble)).requires_grad_();
         return torch::autograd::grad({at::linalg_solve(on(spd(8)), b).square().sum()}, {b});
       }},
      {"inference_mode",
       [](const Place& on) {
         const c10::InferenceMode guard;
         auto x = on(random({4, 4}));
         x.slice(0, 0, 2).mul_(2);
         return Tensors{x.mm(x.t()), x};
       }},
      {"adam_steps",
       [](const Place& on) {
         auto p = on(at::zeros({4})).requires_grad_();
         auto m = at::zeros_like(p), v = at::zeros_like(p);
         for (int t = 1; t <= 3; ++t) {
           const auto g = torch::autograd::grad({(p - 1).pow(2).sum()}, {p})[0];
           const c10::AutoGradMode no_grad(false);
           m.mul_(0.9).add_(g, 0.1);
           v.mul_(0.999).addcmul_(g, g, 0.001);
           p.addcdiv_(m / (1 - std::pow(0.9, t)), (v / (1 - std::pow(0.999, t))).sqrt().add_(1e-8), -0.1);
         }
         return Tensors{p.detach()};
       }},
  };
  return all;
}

class SimOperators : public ::testing::TestWithParam<size_t> {};

TEST_P(SimOperators, EqualsTheCpuBitForBit) {
  const auto& tested = cases()[GetParam()];
  const auto expected = tested.run(Place{c10::kCPU});
  ASSERT_FALSE(expected.empty());
  for (const auto device : {sim(0), sim(5)}) {
    const auto got = tested.run(Place{device});
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].device(), device) << "result " << i;
      EXPECT_EQ(got[i].scalar_type(), expected[i].scalar_type()) << "result " << i;
      EXPECT_EQ(got[i].sizes(), expected[i].sizes()) << "result " << i;
      EXPECT_TRUE(at::equal(got[i].cpu(), expected[i])) << "result " << i << "\n"
                                                        << got[i].cpu() << "\n"
                                                        << expected[i];
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SimOperators, ::testing::Range<size_t>(0, cases().size()),
                         [](const auto& info) { return std::string(cases()[info.param].name); });

TEST(SimViews, ShareMemoryWithTheirBase) {
  const auto x = random({8, 8}).to(sim(0));
  auto v = x.view({4, 16});
  EXPECT_TRUE(v.is_alias_of(x));
  v.zero_();
  EXPECT_EQ(x.abs().sum().item<float>(), 0.F);
  EXPECT_TRUE(x.t().is_alias_of(x));
  EXPECT_FALSE(x.clone().is_alias_of(x));
}

TEST(SimViews, WritesToASavedTensorAreCaughtByAutograd) {
  const auto x = random({4}).to(sim(0)).requires_grad_();
  auto y = x.exp();
  auto z = y.sum();
  y.slice(0, 0, 1).detach().zero_();
  EXPECT_THROW(z.backward(), c10::Error);
}

TEST(SimReading, ItemPrintEqual) {
  const auto a = random({8, 8});
  const auto x = a.to(sim(1));
  EXPECT_EQ(x.sum().item<float>(), a.sum().item<float>());
  EXPECT_TRUE(at::equal(x, x.clone()));
  std::ostringstream text;
  text << x.slice(0, 0, 1);
  EXPECT_NE(text.str().find("sim"), std::string::npos);
}

TEST(SimCopies, AreCopies) {
  auto a = random({4});
  const auto before = a.clone();
  const auto x = a.to(sim(0));
  a.zero_();
  EXPECT_TRUE(at::equal(x.cpu(), before));
  const auto y = x.to(sim(1));
  EXPECT_EQ(y.device(), sim(1));
  y.zero_();
  EXPECT_TRUE(at::equal(x.cpu(), before));
}

TEST(SimAutograd, CrossesDevices) {
  const auto a = random({8});
  const auto x = a.to(sim(0)).requires_grad_();
  const auto y = (x * 2).to(sim(3));
  (y * y).sum().to(c10::kCPU).backward();
  EXPECT_EQ(x.grad().device(), sim(0));
  EXPECT_TRUE(at::equal(x.grad().cpu(), a * 8));
}

}  // namespace sim_operators_test
}  // namespace emend
