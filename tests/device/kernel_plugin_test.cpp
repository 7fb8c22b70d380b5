// Our own kernels against LibTorch's operators: those of the host, which are made from the same source as a GPU's.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/kernels.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/detail/active_set.h>
#include <emend/editors/detail/target_engines.h>
#include <emend/models/config.h>
#include <emend/models/detail/decoder_pass.h>
#include <emend/models/generation.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/editor_models.h"
#include "support/spread_plan.h"

namespace emend {
namespace kernel_plugin_test {

using devices::KernelScope;
using testing::relative_difference;

// The stand-in, or on a machine with a GPU and a build with -DEMEND_WITH_CUDA=ON the real one.
struct Tested {
  const devices::KernelPlugin* plugin = nullptr;
  c10::Device device = c10::kCPU;
};

const Tested& stand_in() {
  static const Tested tested = [] {
    std::string text;
    return Tested{devices::open_kernel_plugin(EMEND_BINARY_DIR "/tests/libemend_kernels_stand_in.so", text), c10::kCPU};
  }();
  return tested;
}

// A set for each set of instructions that this processor has, and the stand-in, which is a library of its own.
std::vector<Tested> on_the_host() {
  std::vector<Tested> all = {stand_in()};
  for (const auto* set : devices::host_kernels()) all.push_back({set});
  return all;
}

at::Tensor random(const Tested& on, at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return devices::route_to(at::randn(sizes).to(dtype), on.device, devices::Purpose::kOther);
}

double tolerance(at::ScalarType dtype) {
  return dtype == at::kFloat ? 1e-5 : 2e-2;  // a bfloat16 number has 8 bits; gradients pass through two of them
}

// What `work` makes of leaves with a gradient: results, then gradients of their sum weighted by fixed numbers.
using Work = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::vector<at::Tensor> both_ways(const std::vector<at::Tensor>& inputs, const Work& work) {
  std::vector<at::Tensor> leaves;
  for (const auto& x : inputs) leaves.push_back(x.detach().clone().requires_grad_());
  auto results = work(leaves);
  std::vector<at::Tensor> seeds;
  for (const auto& y : results)
    seeds.push_back((at::arange(y.numel(), y.options().dtype(at::kFloat)) * 0.37).sin().to(y.scalar_type()).view_as(y));
  const auto gradients = torch::autograd::grad(results, leaves, seeds);
  results.insert(results.end(), gradients.begin(), gradients.end());
  return results;
}

// The same work with the kernels and without them.
void expect_same(const Tested& on, const std::vector<at::Tensor>& inputs, const Work& work, const std::string& what) {
  const KernelScope without(nullptr);
  const auto expected = both_ways(inputs, work);
  const KernelScope with(on.plugin);
  const auto got = both_ways(inputs, work);
  const at::NoGradGuard no_grad;
  const auto forward = work(inputs);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(got[i].scalar_type(), expected[i].scalar_type()) << what;
    EXPECT_LT(relative_difference(got[i].cpu(), expected[i].cpu()), tolerance(inputs[0].scalar_type())) << what << i;
    if (i < forward.size()) {
      EXPECT_TRUE(at::equal(forward[i], got[i])) << what << ", with and without gradient";
    }
  }
}

void test_norms(const Tested& on) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const bool one_plus : {false, true})
      for (const int64_t width : {40, 1500}) {
        models::ModelConfig config;
        config.norm = models::Norm::kRms;
        config.norm_eps = 1e-5, config.norm_one_plus = one_plus;
        const models::detail::Linear weights{random(on, {width}, dtype), {}};
        const at::Tensor x = random(on, {7, width}, dtype), y = random(on, {7, width}, dtype);
        const std::string what = std::string(c10::toString(dtype)) + (one_plus ? ", 1 + w " : " ");
        expect_same(
            on, {x, y},
            [&](const auto& in) -> std::vector<at::Tensor> {
              const auto [sum, normed] = models::detail::add_and_norm(in[0], in[1], weights, config);
              return {sum, normed};
            },
            what);
        {
          const KernelScope with(on.plugin);
          EXPECT_TRUE(at::equal(devices::add_rms_norm(x, y, weights.weight, 1e-5, one_plus).sum, x + y)) << what;
        }
        expect_same(
            on, {x},
            [&](const auto& in) -> std::vector<at::Tensor> {
              return {models::detail::apply_norm(in[0], weights, config)};
            },
            what);
        expect_same(
            on, {x, y},
            [&](const auto& in) -> std::vector<at::Tensor> {  // one result is not used
              return {models::detail::add_and_norm(in[0], in[1], weights, config).normed};
            },
            what);
      }
}

void test_rotary(const Tested& on) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const bool interleaved : {false, true})
      for (const int64_t turned : {6, 10}) {
        models::detail::RotaryTable table{random(on, {5, 1, turned}, dtype), random(on, {5, 1, turned}, dtype),
                                          interleaved};
        expect_same(
            on, {random(on, {5, 50}, dtype)},
            [&](const auto& in) -> std::vector<at::Tensor> {
              const at::Tensor heads = in[0].unflatten(1, {5, 10}).narrow(1, 1, 3);  // a part of a fused product
              return {models::detail::apply_rotary(heads, table)};
            },
            std::string(c10::toString(dtype)) + (interleaved ? ", interleaved, " : ", halves, ") +
                std::to_string(turned));
      }
}

void test_gates(const Tested& on) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const int64_t width : {5, 700}) {
      const std::string what = std::string(c10::toString(dtype)) + " " + std::to_string(width);
      at::Tensor both = random(on, {6, 2 * width}, dtype) * 8;
      both[0][0] = -120, both[1][1] = 95;  // beyond what e^x holds
      expect_same(
          on, {both},
          [&](const auto& in) -> std::vector<at::Tensor> {  // halves of a fused product
            const auto halves = in[0].chunk(2, 1);
            if (devices::own_kernels(in[0])) return {devices::gated(halves[0], halves[1], false)};
            return {at::silu(halves[0]) * halves[1]};
          },
          what);
      const KernelScope with(on.plugin);
      const at::Tensor gate = random(on, {6, width}, dtype), up = random(on, {6, width}, dtype);
      const at::Tensor apart = devices::gated(gate, up, false), within = gate.clone();
      EXPECT_TRUE(at::equal(devices::gated(within, up, true), apart) && at::equal(within, apart)) << what;
      within[2][3] = NAN;
      EXPECT_EQ(at::isnan(devices::gated(within, up, false)).sum().item<int64_t>(), 1) << what;
    }
}

void test_loss(const Tested& on) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const bool floors : {false, true}) {
      at::Tensor logits = random(on, {9, 1203}, dtype) * 4;
      logits.select(1, 7).fill_(-INFINITY);
      const at::Tensor labels = logits.argmax(1);
      labels.narrow(0, 0, 5).fill_(30);
      const at::Tensor weight = random(on, {9}), floor = floors ? random(on, {9}).abs() * 6 : at::Tensor();
      const KernelScope with(on.plugin);
      const auto own = devices::head_loss(logits, labels, weight, floor, true);
      const at::Tensor leaf = logits.detach().requires_grad_();
      const at::Tensor log_p = at::log_softmax(leaf, 1, at::kFloat);
      const at::Tensor picked = log_p.gather(1, labels.unsqueeze(1)).squeeze(1);
      const at::Tensor nll = floors ? (-picked - floor).clamp_min(0) : -picked;
      const at::Tensor gradient = torch::autograd::grad({(nll * weight).sum()}, {leaf})[0];
      EXPECT_LT(relative_difference(own.nll_M.cpu(), nll.detach().cpu()), 1e-5);
      EXPECT_LT(relative_difference(own.grad_MV.cpu(), gradient.cpu()), tolerance(dtype));
      EXPECT_TRUE(at::equal(own.hit_M, picked >= log_p.amax(1)));
      EXPECT_FALSE(devices::head_loss(logits, labels, weight, floor, false).grad_MV.defined());
      logits[3][11] = NAN;
      EXPECT_TRUE(std::isnan(devices::head_loss(logits, labels, weight, floor, true).nll_M[3].item<float>()))
          << "a fact without a number must fail";
    }
}

// Each kernel's use in the engine, over several steps: the loss, the step of δ, norms and rotary with their gradients.
void test_targets(const Tested& on) {
  const models::Model model = testing::tiny_model({.place = testing::over_devices({on.device})});
  std::vector<editors::TargetProblem> problems;
  for (const auto& fact : testing::tiny_facts())
    problems.push_back(
        editors::make_target_problem(editors::render_prompts(model.tokenizer(), fact, testing::tiny_contexts(), {})));
  editors::TargetSpec spec;
  spec.sites = {{hooks::Site::kLayerOut, 1}};
  spec.steps = 6;
  spec.clamp_norm_factor = 0.75;
  spec.weight_decay = 0.5;
  const auto run = [&](const devices::KernelPlugin* plugin) {
    const KernelScope scope(plugin);
    return editors::optimise_targets(model, problems, spec, {});
  };
  const auto expected = run(nullptr), got = run(on.plugin);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(got[i].steps, expected[i].steps);
    EXPECT_LT(relative_difference(got[i].target_D[0], expected[i].target_D[0]), 2e-3) << i;
    for (size_t t = 0; t < expected[i].curve.size(); ++t)
      EXPECT_NEAR(got[i].curve[t].loss, expected[i].curve[t].loss, 1e-3) << i << ", step " << t;
  }
}

const std::vector<std::vector<int64_t>> kPrompts = {{5, 17, 3, 60, 61, 2, 9}, {88}, {4, 4, 4}, {10, 20, 30, 40}};

TEST(Kernels, OfEveryProcessorAreLibTorchs) {
  ASSERT_TRUE(stand_in().plugin);
  for (const auto& on : on_the_host()) {
    test_norms(on);
    test_rotary(on);
    test_gates(on);
    test_loss(on);
    test_targets(on);
  }
}

TEST(Kernels, GiveTheSameForAnyNumberOfThreads) {
  const at::Tensor x = at::randn({301, 4000}), w = at::randn({4000});
  const auto all = [&](int threads) {
    at::set_num_threads(threads);
    return devices::add_rms_norm(x, x, w, 1e-5, false).normed + devices::gated(x, x, false);
  };
  const int before = at::get_num_threads();
  const at::Tensor one = all(1), three = all(3);
  at::set_num_threads(before);
  EXPECT_TRUE(at::equal(one, three));
}

// In every family: logits, the gradient of what enters a layer, and text, which goes through the cache.
TEST(Kernels, PassesOfAllFamiliesAreLibTorchs) {
  for (const auto& [family, flavour] : testing::all_flavours()) {
    const models::Model model = testing::debug_model(family, 3, flavour);
    const auto run = [&](const devices::KernelPlugin* plugin) {
      const KernelScope scope(plugin);
      const models::ForwardOptions options{
          .first_layer = 1,
          .hidden = (at::arange(15 * model.hidden_size(), at::kFloat) * 0.7).sin().view({15, -1}).requires_grad_()};
      const auto result = model.forward(models::TokenBatch::from_rows(kPrompts), options);
      const at::Tensor gradient = torch::autograd::grad({result.logits.sin().sum()}, {options.hidden})[0];
      const models::GenerateOptions generate{.max_new_tokens = 6};
      return std::tuple(result.logits.detach(), gradient, models::generate(model, kPrompts, generate));
    };
    const auto [logits, gradient, text] = run(nullptr);
    const auto [own_logits, own_gradient, own_text] = run(stand_in().plugin);
    EXPECT_LT(relative_difference(own_logits, logits), 1e-5) << family << " " << flavour;
    EXPECT_LT(relative_difference(own_gradient, gradient), 1e-4) << family << " " << flavour;
    EXPECT_EQ(own_text, text) << family << " " << flavour;
  }
}

TEST(Kernels, ServeOnlyWhatTheyAreFor) {
  const KernelScope with(stand_in().plugin);
  EXPECT_TRUE(devices::own_kernels(at::zeros({1})));
  EXPECT_TRUE(devices::own_kernels(at::zeros({1}, at::kBFloat16)));
  EXPECT_FALSE(devices::own_kernels(at::zeros({1}, at::kDouble)));
  EXPECT_FALSE(devices::own_kernels(at::zeros({1}, at::kHalf)));
  {
    const devices::PlainOperators plain;
    EXPECT_FALSE(devices::own_kernels(at::zeros({1}))) << "the reference engines do without";
  }
  const KernelScope without(nullptr);
  EXPECT_FALSE(devices::own_kernels(at::zeros({1})));
}

TEST(Kernels, TheLoaderSaysWhatItFound) {
  std::string text;
  EXPECT_FALSE(devices::open_kernel_plugin("/nowhere/libemend_cuda.so", text));
  EXPECT_NE(text.find("no kernels plug-in: /nowhere/libemend_cuda.so"), std::string::npos) << text;
  EXPECT_FALSE(devices::open_kernel_plugin("libm.so.6", text));
  EXPECT_NE(text.find("it has no emend_kernel_plugin"), std::string::npos) << text;
}

TEST(Kernels, OnAGpuAreLibTorchs) {
#ifdef EMEND_CUDA_LIBRARY
  if (devices::load_cuda_runtime().devices == 0)
    GTEST_SKIP() << "needs a CUDA device: " << devices::load_cuda_runtime().reason;
  std::string text;
  const Tested real{devices::open_kernel_plugin(EMEND_CUDA_LIBRARY, text), c10::Device(c10::kCUDA, 0)};
  ASSERT_TRUE(real.plugin) << text;
  const auto before = at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  test_norms(real);
  test_rotary(real);
  test_gates(real);
  test_loss(real);
  test_targets(real);
  EXPECT_EQ(at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL), before);
#else
  GTEST_SKIP() << "needs a build with -DEMEND_WITH_CUDA=ON, and so nvcc";
#endif
}

}  // namespace kernel_plugin_test
}  // namespace emend
