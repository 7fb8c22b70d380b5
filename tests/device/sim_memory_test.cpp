// Memory accounts, limits and random numbers of the simulated devices.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <emend/devices/detail/sim_backend.h>
#include <emend/devices/detail/sim_memory.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/devices/simulated.h>
#include <gtest/gtest.h>

#include "support/error_of.h"
#include "support/simulated.h"

namespace emend::devices {
namespace sim_memory_test {

using at::Tensor;
using testing::sim;

at::TensorOptions on(int index) {
  return at::TensorOptions().device(sim(index));
}

TEST(SimMemory, CountsWhatLives) {
  const auto before = device_memory_stats(sim(2)).allocated;
  {
    const auto x = at::zeros({1000}, on(2));
    EXPECT_EQ(device_memory_stats(sim(2)).allocated, before + 4000);
    const auto y = x + 1, view = y.slice(0, 0, 10), moved = x.to(sim(3));
    EXPECT_EQ(device_memory_stats(sim(2)).allocated, before + 8000) << "views and other devices are free";
  }
  EXPECT_EQ(device_memory_stats(sim(2)).allocated, before);
  EXPECT_GE(device_memory_stats(sim(2)).peak, before + 8000);
  reset_peak_memory(sim(2));
  EXPECT_EQ(device_memory_stats(sim(2)).peak, before);
}

TEST(SimMemory, CountsResizedOutputs) {
  const auto before = device_memory_stats(sim(2)).allocated;
  {
    auto out = at::empty({0}, on(2));
    const auto x = at::ones({10, 10}, on(2));
    at::mm_out(out, x, x);
    EXPECT_EQ(device_memory_stats(sim(2)).allocated, before + 800);
    out.resize_({20, 10});
    EXPECT_EQ(device_memory_stats(sim(2)).allocated, before + 1200);
  }
  EXPECT_EQ(device_memory_stats(sim(2)).allocated, before);
}

TEST(SimMemory, RunsOutAtTheLimitAndRecovers) {
  const auto before = device_memory_stats(sim(4)).allocated;
  const auto half = at::ones({250}, on(4));
  {
    const testing::SimulatedLimitScope limit(4, before + 2000);
    EXPECT_THROW(at::zeros({1000}, on(4)), c10::OutOfMemoryError);
    EXPECT_THROW((half.expand({4, 250}) + 1), c10::OutOfMemoryError) << "results count too";
    EXPECT_EQ(device_memory_stats(sim(4)).allocated, before + 1000) << "a refused allocation leaves no trace";
    EXPECT_NO_THROW(at::zeros({250}, on(4)));
    EXPECT_NO_THROW(at::zeros({1000}, on(5))) << "other devices have no limit";
    testing::expect_error(ErrorClass::kDevice, {"moving weight from cpu to sim:4"},
                          [] { (void)route_to(at::ones({1000}), sim(4), Purpose::kWeight); });
  }
  EXPECT_NO_THROW(at::zeros({1000}, on(4)));
}

TEST(SimMemory, LimitsAreChecked) {
  EXPECT_THROW(set_simulated_memory_limit(8, 1), Error);
  EXPECT_THROW(set_simulated_memory_limit(-1, 1), Error);
  EXPECT_THROW(set_simulated_memory_limit(0, -1), Error);
}

TEST(SimMemory, VisibleDevicesShowLimits) {
  (void)sim(0);
  const testing::SimulatedLimitScope limit(6, 123456);
  for (const auto& info : visible_devices())
    if (info.device == sim(6)) {
      EXPECT_EQ(info.total_bytes, 123456);
      EXPECT_EQ(info.free_bytes, 123456);
      return;
    }
  FAIL() << "sim:6 is not visible";
}

TEST(SimRandom, EqualSeedsGiveEqualNumbersOnEveryDevice) {
  (void)sim(0);
  at::manual_seed(7);
  const auto expected = at::randn({4});
  for (const int index : {0, 3}) {
    at::manual_seed(7);
    EXPECT_TRUE(at::equal(at::randn({4}, on(index)).cpu(), expected));
    auto generator = at::globalContext()
                         .getAcceleratorHooksInterface(kSimulated)
                         .getNewGenerator(static_cast<c10::DeviceIndex>(index));
    generator.set_current_seed(7);
    EXPECT_EQ(generator.device(), sim(index));
    EXPECT_TRUE(at::equal(at::randn({4}, generator, on(index)).cpu(), expected));
    const auto copy = generator.clone();
    EXPECT_TRUE(at::equal(at::randperm(9, generator, on(index)), at::randperm(9, copy, on(index))));
  }
}

TEST(SimRandom, FactoriesTakeTheDevice) {
  for (const auto& t :
       {at::randn({3}, on(1)), at::rand({3}, on(1)), at::randint(0, 5, {3}, on(1)), at::randperm(5, on(1)),
        at::zeros({2}, on(1)).normal_(), at::bernoulli(at::full({3}, 0.5, on(1)))})
    EXPECT_EQ(t.device(), sim(1));
}

TEST(SimRoute, MovesRealDataAndGradients) {
  const auto a = at::rand({4, 8}, at::kDouble);
  const auto home = at::zeros({1}, on(1).dtype(at::kFloat));
  TransferScope scope;
  const auto x = a.clone().requires_grad_();
  const auto y = route_like(x, home, Purpose::kDelta, Dtype::kMatch);
  EXPECT_EQ(y.device(), sim(1));
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(to_host(y.detach()), a.to(at::kFloat)));
  EXPECT_EQ(scope.total(Purpose::kDelta).bytes, 4 * 8 * 4);
  EXPECT_EQ(scope.total(Purpose::kHost).count, 1);
  to_host((y * 3).sum()).backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full_like(a, 3)));
}

TEST(SimRoute, StagedPairsPassThroughTheHost) {
  const auto x = at::rand({4}).to(sim(1));
  stage_through_host(sim(1), sim(2));
  EXPECT_TRUE(is_staged(sim(1), sim(2)));
  EXPECT_FALSE(is_staged(sim(2), sim(1)));
  TransferScope scope;
  const auto y = route_to(x, sim(2), Purpose::kHidden);
  stage_through_host(sim(1), sim(2), false);
  EXPECT_FALSE(is_staged(sim(1), sim(2)));
  EXPECT_TRUE(at::equal(y.cpu(), x.cpu()));
  EXPECT_EQ(scope.total().count, 1);
}

TEST(HostMemory, StatsAreOfThisProcess) {
  const auto before = device_memory_stats(c10::Device(c10::kCPU));
  EXPECT_GT(before.allocated, 1 << 20);
  EXPECT_GE(before.peak, before.allocated);
  const auto big = at::ones({64 << 20}, at::kByte);
  EXPECT_GT(device_memory_stats(c10::Device(c10::kCPU)).allocated, before.allocated + (48 << 20));
}

TEST(VisibleDevices, CpuComesFirstWithItsMemory) {
  const auto devices = visible_devices();
  ASSERT_FALSE(devices.empty());
  EXPECT_TRUE(devices[0].device.is_cpu());
  EXPECT_GT(devices[0].total_bytes, 0);
  EXPECT_GT(devices[0].free_bytes, 0);
  EXPECT_LE(devices[0].free_bytes, devices[0].total_bytes);
}

// CUDA's allocator keeps what is freed: the driver counts it as taken, and the next tensor has it.
TEST(VisibleDevices, WhatTheAllocatorKeepsIsFree) {
  const testing::SimulatedLimitScope limit(5, 1 << 20);
  (void)sim(5);
  const auto free_bytes = [] {
    for (const auto& info : visible_devices())
      if (info.device == sim(5)) return info.free_bytes;
    return int64_t{-1};
  };
  const int64_t before = free_bytes();
  detail::keep_simulated_blocks(true);
  (void)at::zeros({100000}, on(5));
  EXPECT_GE(detail::reserved_by_simulated(5), 400000) << "kept";
  EXPECT_EQ(free_bytes(), before);
  release_unused_memory();
  EXPECT_LT(detail::reserved_by_simulated(5), 400000);
  EXPECT_EQ(free_bytes(), before);
  detail::keep_simulated_blocks(false);
}

TEST(Streams, OfALaneLiveAsLongAsTheProcess) {
  const std::vector<c10::Device> devices = {sim(1), c10::Device(c10::kCPU), sim(2), sim(1)};
  EXPECT_EQ(StreamSet(devices, 0).streams().size(), 2U);
  EXPECT_EQ(StreamSet(devices, 1).streams().size(), 2U);
  const int taken = detail::simulated_streams_taken();
  for (int call = 0; call < 10; ++call) {
    const StreamSet first(devices, 0), second(devices, 1);
    EXPECT_NE(first.streams()[0], second.streams()[0]);
  }
  EXPECT_EQ(detail::simulated_streams_taken(), taken) << "memory and workspaces belong to streams: new ones pile up";
}

}  // namespace sim_memory_test
}  // namespace emend::devices
