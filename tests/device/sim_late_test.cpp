// Simulated devices that are switched on after autograd has already run in the process. One test only: the
// state of a fresh process is what it is about.
#include <ATen/ATen.h>
#include <emend/devices/simulated.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <iostream>
#include <thread>

#include "support/simulated.h"

namespace emend {
namespace sim_late_test {

TEST(SimLate, AutogradServesDevicesThatCameAfterItsFirstPass) {
  EXPECT_EQ(devices::simulated_device_count(), 0);
  EXPECT_THROW(at::empty({1}, at::TensorOptions().device(c10::Device(devices::kSimulated, 0))), c10::Error);
  const auto on_cpu = at::ones({2}).requires_grad_();
  (on_cpu * 2).sum().backward();
  const auto start = std::chrono::steady_clock::now();
  const auto last = testing::sim(7);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  std::cout << "switching on: " << took.count() << " ms\n";
  const auto x = at::ones({2}).to(last).requires_grad_();
  (x * 3).sum().to(testing::sim(2)).backward();
  EXPECT_TRUE(at::equal(x.grad().cpu(), at::full({2}, 3.F)));
  (on_cpu * 2).sum().backward();
  EXPECT_TRUE(at::equal(on_cpu.grad(), at::full({2}, 4.F)));
}

TEST(SimLate, ThreadsShareTheDevicesButNotTheCurrentOne) {
  const auto a = at::rand({64, 64});
  const auto expected = a.mm(a);
  std::vector<std::thread> threads;
  std::array<bool, 4> equal{};
  for (int k = 0; k < 4; ++k)
    threads.emplace_back([&, k] {
      bool all = true;
      for (int i = 0; i < 50; ++i) {
        const auto x = a.to(testing::sim(k)).requires_grad_();
        const auto y = x.mm(x);
        all = all && y.device() == testing::sim(k) && at::allclose(y.detach().cpu(), expected);
        y.sum().backward();
        all = all && x.grad().device() == testing::sim(k);
      }
      equal[static_cast<size_t>(k)] = all;
    });
  for (auto& thread : threads) thread.join();
  for (const bool e : equal) EXPECT_TRUE(e);
}

}  // namespace sim_late_test
}  // namespace emend
