#include <emend/core/error.h>
#include <emend/devices/placement.h>
#include <emend/devices/runtime.h>
#include <gtest/gtest.h>

namespace emend::devices {
namespace device_runtime_test {

TEST(CudaRuntime, IsNotOpenedUnasked) {
  (void)visible_devices();
  (void)device_memory_stats(c10::Device(c10::kCPU));
  EXPECT_FALSE(cuda_runtime_was_asked());
}

TEST(CudaRuntime, HasDevicesOrAReason) {
  const auto& runtime = load_cuda_runtime();
  EXPECT_TRUE(cuda_runtime_was_asked());
  EXPECT_EQ(runtime.devices > 0, runtime.reason.empty()) << runtime.reason;
  EXPECT_EQ(&runtime, &load_cuda_runtime());
  if (runtime.devices == 0) {
    try {
      (void)device_memory_stats(c10::Device(c10::kCUDA, 0));
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.error_class(), ErrorClass::kDevice);
      EXPECT_NE(std::string(error.what()).find(runtime.reason), std::string::npos) << error.what();
    }
  }
  size_t seen = 0;
  for (const auto& info : visible_devices()) seen += info.device.is_cuda();
  EXPECT_EQ(seen, static_cast<size_t>(runtime.devices));
}

}  // namespace device_runtime_test
}  // namespace emend::devices
