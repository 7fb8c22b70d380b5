// What needs a real GPU: the runtime opens, memory is counted, tensors and gradients travel. Skips without one.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <emend/devices/planner.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/model_shape.h"

namespace emend::devices {
namespace device_cuda_test {

#define EMEND_NEEDS_CUDA() \
  if (load_cuda_runtime().devices == 0) GTEST_SKIP() << "needs a CUDA device: " << load_cuda_runtime().reason

c10::Device gpu(int index = 0) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}
const c10::Device kCpu(c10::kCPU);

TEST(Cuda, DevicesHaveNamesAndMemory) {
  EMEND_NEEDS_CUDA();
  int seen = 0;
  for (const auto& info : visible_devices()) {
    if (!info.device.is_cuda()) continue;
    ++seen;
    EXPECT_FALSE(info.name.empty());
    EXPECT_GT(info.total_bytes, 1LL << 30);
    EXPECT_GT(info.free_bytes, 0);
    EXPECT_LE(info.free_bytes, info.total_bytes);
  }
  EXPECT_EQ(seen, load_cuda_runtime().devices);
  EXPECT_EQ(parse_device_name("cuda:0"), gpu());
  EXPECT_NO_THROW(require_visible(gpu(), "device"));
}

TEST(Cuda, RoutesDataAndGradients) {
  EMEND_NEEDS_CUDA();
  TransferScope scope;
  const auto a = at::rand({64, 32});
  const auto home = at::zeros({1}, at::TensorOptions().device(gpu()));
  const auto x = a.clone().requires_grad_();
  const auto y = route_like(x, home, Purpose::kHidden);
  EXPECT_EQ(y.device(), gpu());
  to_host((y * y).sum()).backward();
  EXPECT_TRUE(at::allclose(x.grad(), 2 * a));
  EXPECT_EQ(scope.total(Purpose::kHidden).bytes, 64 * 32 * 4);
  EXPECT_THROW(a + home.expand({64, 32}).contiguous(), c10::Error);
}

TEST(Cuda, CountsMemory) {
  EMEND_NEEDS_CUDA();
  reset_peak_memory(gpu());
  const auto before = device_memory_stats(gpu());
  {
    const auto big = at::ones({32 << 20}, at::TensorOptions().device(gpu()).dtype(at::kByte));
    EXPECT_GE(device_memory_stats(gpu()).allocated, before.allocated + (32 << 20));
  }
  EXPECT_GE(device_memory_stats(gpu()).peak, before.allocated + (32 << 20));
  EXPECT_EQ(device_memory_stats(gpu()).allocated, before.allocated);
}

TEST(Cuda, SplitOverCpuAndGpuEqualsOneDevice) {
  EMEND_NEEDS_CUDA();
  std::vector<at::Tensor> weights;
  for (int l = 0; l < 4; ++l) weights.push_back(at::randn({64, 64}) * 0.1);
  const auto input = at::randn({8, 64});
  const auto run = [&](const std::vector<c10::Device>& layers) {
    auto x = input.clone().requires_grad_();
    auto h = x;
    for (size_t l = 0; l < layers.size(); ++l) {
      const auto w = route_to(weights[l], layers[l], Purpose::kWeight);
      h = at::gelu(at::linear(route_like(h, w, Purpose::kHidden), w)) + route_like(h, w, Purpose::kHidden);
    }
    const auto loss = to_host(h.square().sum());
    return torch::autograd::grad({loss}, {x})[0];
  };
  const auto expected = run({kCpu, kCpu, kCpu, kCpu});
  for (size_t cut = 0; cut <= 4; ++cut) {
    std::vector<c10::Device> layers(4, kCpu);
    for (size_t l = cut; l < 4; ++l) layers[l] = gpu();
    // float32 products of 64 terms in another order: errors of some 1e-6.
    EXPECT_TRUE(at::allclose(run(layers), expected, 1e-3, 1e-4)) << "cut before layer " << cut;
  }
}

TEST(Streams, OnlyGpusHaveSome) {
  EXPECT_TRUE(StreamSet({kCpu, kCpu}, 0).streams().empty());
  EXPECT_TRUE(StreamSet({}, 0).streams().empty());
}

// Two sets at once write what a default stream reads afterwards.
TEST(Cuda, StreamSetsKeepTheOrder) {
  EMEND_NEEDS_CUDA();
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const auto before = guard.getStream(gpu());
  auto weights = at::zeros({2048, 2048}, at::TensorOptions().device(gpu()));
  for (int round = 1; round <= 10; ++round) {
    weights.fill_(round);  // queued before the sets
    at::Tensor one, two;
    {
      const StreamSet first({gpu(), gpu()}, 0), second({gpu()}, 1);
      ASSERT_EQ(first.streams().size(), 1U);
      {
        const c10::MultiStreamGuard on(first.streams());
        EXPECT_NE(guard.getStream(gpu()), before);
        one = weights.mm(weights);
      }
      const c10::MultiStreamGuard on(second.streams());
      two = weights * 2;
    }
    EXPECT_EQ(guard.getStream(gpu()), before);
    weights.fill_(-1);  // must not reach the products
    EXPECT_EQ(one.max().item<float>(), 2048.0F * static_cast<float>(round * round));
    EXPECT_EQ(two.min().item<float>(), 2.0F * static_cast<float>(round));
  }
}

TEST(Cuda, AutoPutsASmallModelOnTheGpus) {
  EMEND_NEEDS_CUDA();
  PlanRequest request;
  request.map = parse_device_map("auto");
  request.machine = prepare_devices(request.map);
  request.model.n_layers = 4;
  request.model.hidden = request.model.mlp_width = 64;
  request.model.vocab = 100;
  testing::derive_bytes(request.model);
  const auto plan = make_plan(request);
  EXPECT_TRUE(plan.fits);
  for (const auto device : plan.placement.devices()) EXPECT_TRUE(device.is_cuda());
}

}  // namespace device_cuda_test
}  // namespace emend::devices
