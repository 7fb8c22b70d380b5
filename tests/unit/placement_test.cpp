#include <emend/devices/placement.h>
#include <gtest/gtest.h>

#include "support/error_of.h"

namespace emend::devices {
namespace placement_test {

using testing::expect_error;

const c10::Device kCpu(c10::kCPU);
c10::Device cuda(int index) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}
c10::Device sim(int index) {
  return {kSimulated, static_cast<c10::DeviceIndex>(index)};
}

TEST(DeviceName, ParsesAndPrintsBack) {
  for (const auto& [text, device] : std::vector<std::pair<std::string, c10::Device>>{
           {"cpu", kCpu}, {"cuda:0", cuda(0)}, {"cuda:11", cuda(11)}, {"sim:3", sim(3)}}) {
    EXPECT_EQ(parse_device_name(text), device);
    EXPECT_EQ(to_string(device), text);
  }
  EXPECT_EQ(parse_device_name("cuda"), cuda(0));
  EXPECT_EQ(parse_device_name("2"), cuda(2));
}

TEST(DeviceName, RefusesWithAReason) {
  for (const char* text : {"", "gpu", "cuda:", "cuda:-1", "cuda:+1", "cuda:0,1", "cuda:1x", "cuda:999999999999",
                           "sim:", "cuda:64", "meta", "mps", "cpu:0", " cpu"})
    expect_error(ErrorClass::kInvalidArgument, {"device \"" + std::string(text) + "\""},
                 [&] { (void)parse_device_name(text); });
  expect_error(ErrorClass::kUnsupported, {}, [] { (void)parse_device_name("disk"); });
}

TEST(DeviceName, InvisibleDeviceErrorSaysWhatIsVisible) {
  expect_error(ErrorClass::kDevice, {"one of cpu"},
               [] { require_visible(parse_device_name("cuda:63"), "device \"cuda:63\""); });
}

TEST(PlacementPlan, SingleIsOneDevice) {
  const auto plan = PlacementPlan::single(kCpu, 3);
  EXPECT_TRUE(plan.is_monotone());
  EXPECT_EQ(plan.layers.size(), 3U);
  EXPECT_EQ(plan.devices(), std::vector<c10::Device>{kCpu});
}

TEST(PlacementPlan, KnowsItsDevicesAndWhetherOneIsEnteredAgain) {
  auto plan = PlacementPlan::single(sim(0), 4);
  plan.layers[2] = plan.layers[3] = plan.final_norm = plan.head = sim(1);
  EXPECT_EQ(plan.devices(), (std::vector<c10::Device>{sim(0), sim(1)}));
  EXPECT_TRUE(plan.is_monotone());
  plan.head = sim(0);  // tied, with the embedding
  EXPECT_TRUE(plan.is_monotone());
  plan.layers[3] = sim(0);
  EXPECT_FALSE(plan.is_monotone());
}

TEST(PlacementPlan, DumpsModuleNamesInOrder) {
  auto plan = PlacementPlan::single(cuda(0), 2);
  plan.layers[1] = plan.final_norm = plan.head = cuda(1);
  ModuleNames names;
  names.embedding = {"transformer.wte", "transformer.project_in"};
  names.position = {"transformer.wpe"};
  names.layer = [](int64_t l) { return "transformer.h." + std::to_string(l); };
  names.final_norm = {"transformer.ln_f"};
  names.head = {"lm_head"};
  EXPECT_EQ(
      plan.to_json(names).dump(),
      R"({"transformer.wte":"cuda:0","transformer.project_in":"cuda:0","transformer.wpe":"cuda:0","transformer.h.0":"cuda:0",)"
      R"("transformer.h.1":"cuda:1","transformer.ln_f":"cuda:1","lm_head":"cuda:1"})");
}

}  // namespace placement_test
}  // namespace emend::devices
