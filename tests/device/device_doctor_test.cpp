#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <emend/devices/detail/sim_backend.h>
#include <emend/devices/doctor.h>
#include <emend/devices/route.h>
#include <gtest/gtest.h>

#include <thread>

#include "support/simulated.h"

namespace emend::devices {
namespace device_doctor_test {

using testing::sim;

const Check* find(const std::vector<Check>& checks, const std::string& name) {
  for (const auto& check : checks)
    if (check.name == name) return &check;
  return nullptr;
}

TEST(Doctor, ChecksEveryOrderedPair) {
  const auto checks = check_copies({sim(0), sim(1), sim(2), c10::Device(c10::kCPU)});
  EXPECT_EQ(checks.size(), 12U);
  for (const auto& check : checks) EXPECT_EQ(check.status, CheckStatus::kOk) << check.name << ": " << check.detail;
  EXPECT_NE(find(checks, "copy sim:2 -> cpu"), nullptr);
}

TEST(Doctor, FindsWrongCopiesAndGoesRoundThem) {
  (void)sim(0);
  detail::break_simulated_copies(1, 2);
  const auto data = at::randint(0, 256, {10000}, at::kByte);
  const auto there = data.to(sim(1));
  EXPECT_FALSE(at::equal(to_host(route_to(there, sim(2), Purpose::kHidden)), data)) << "the fault is real";
  const auto checks = check_copies({sim(1), sim(2)});
  ASSERT_EQ(checks.size(), 2U);
  const auto* bad = find(checks, "copy sim:1 -> sim:2");
  ASSERT_NE(bad, nullptr);
  EXPECT_EQ(bad->status, CheckStatus::kFailed);
  EXPECT_NE(bad->detail.find("arrived wrong"), std::string::npos);
  EXPECT_FALSE(bad->advice.empty());
  EXPECT_EQ(find(checks, "copy sim:2 -> sim:1")->status, CheckStatus::kOk);
  EXPECT_TRUE(is_staged(sim(1), sim(2)));
  EXPECT_FALSE(is_staged(sim(2), sim(1)));
  EXPECT_TRUE(at::equal(to_host(route_to(there, sim(2), Purpose::kHidden)), data)) << "and is gone round";
  stage_through_host(sim(1), sim(2), false);
  detail::break_simulated_copies(-1, -1);
}

TEST(Doctor, ThousandsOfRandomRoutesArriveIntact) {
  auto generator = at::detail::createCPUGenerator(3);
  const auto original = at::randn({257}, generator);
  auto travelling = original;
  for (int i = 0; i < 10000; ++i) travelling = route_to(travelling, sim((i * 5 + i / 7) % 8), Purpose::kOther);
  EXPECT_TRUE(at::equal(to_host(travelling), original));
}

TEST(Doctor, WarnsOfLittleMemory) {
  std::vector<DeviceInfo> devices{{sim(0), "a", "", 1000, 10}, {sim(1), "b", "", 1000, 900}};
  auto checks = check_memory(devices);
  EXPECT_EQ(checks[0].status, CheckStatus::kWarning);
  EXPECT_EQ(checks[1].status, CheckStatus::kOk);
}

TEST(Doctor, WarnsOfTooManyThreads) {
  const int before = at::get_num_threads();
  at::set_num_threads(static_cast<int>(std::thread::hardware_concurrency()) + 1);
  EXPECT_EQ(check_threads().status, CheckStatus::kWarning);
  at::set_num_threads(before);
}

TEST(Doctor, WholeMachine) {
  const auto checks = check_machine(parse_device_map("sim:2"));
  for (const char* name : {"cuda runtime", "memory of sim:0", "memory of cpu", "copy sim:0 -> sim:1", "threads"})
    ASSERT_NE(find(checks, name), nullptr) << name;
  EXPECT_EQ(find(checks, "cuda runtime")->status, CheckStatus::kSkipped) << "not asked for by this map";
  const auto json = to_json(*find(checks, "threads"));
  for (const char* field : {"name", "status", "detail", "advice"}) EXPECT_TRUE(json.contains(field));
}

TEST(Doctor, MissingDeviceIsAFindingNotACrash) {
  const auto checks = check_machine(parse_device_map("cuda:61"));
  const auto* map = find(checks, "device map");
  ASSERT_NE(map, nullptr);
  EXPECT_EQ(map->status, CheckStatus::kFailed);
  const auto* runtime = find(checks, "cuda runtime");
  EXPECT_EQ(runtime->status == CheckStatus::kOk, load_cuda_runtime().devices > 0);
  EXPECT_EQ(runtime->advice.empty(), load_cuda_runtime().devices > 0);
}

}  // namespace device_doctor_test
}  // namespace emend::devices
