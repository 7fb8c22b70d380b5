#include <ATen/Context.h>
#include <emend/core/error.h>
#include <emend/devices/device_map.h>
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

// cuDNN plans its attention anew for every shape; ours change at nearly every step.
TEST(CudaRuntime, LeavesCudnnOutOfAttention) {
  (void)load_cuda_runtime();
  EXPECT_FALSE(at::globalContext().userEnabledCuDNNSDP());
}

TEST(CudaRuntime, IsOpenedOnlyWhereThereIsADriver) {
  const auto& runtime = load_cuda_runtime();
  if (runtime.driver) return;
  EXPECT_FALSE(runtime.loaded);
  EXPECT_NE(runtime.reason.find("no NVIDIA driver"), std::string::npos) << runtime.reason;
}

TEST(CudaRuntime, TellsFailuresOfAGpuFromMistakes) {
  const c10::SourceLocation here{"f", "file", 1};
  EXPECT_TRUE(is_device_failure(c10::AcceleratorError(here, 700, "CUDA error: an illegal memory access")));
  EXPECT_TRUE(is_device_failure(c10::Error(here, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")));
  EXPECT_TRUE(is_device_failure(c10::Error(here, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")));
  EXPECT_FALSE(is_device_failure(c10::Error(here, "Expected all tensors to be on the same device, cuda:0 and cpu")));
}

// torchrun and the like: every process takes GPUs of its own.
TEST(DeviceMap, ProcessesOfAMachineShareItsGpusOut) {
  const auto of = [](int gpus, int rank, int size) {
    std::vector<int> own;
    for (int g = 0; g < gpus; ++g)
      if (own_gpu(g, gpus, rank, size)) own.push_back(g);
    return own;
  };
  EXPECT_EQ(of(4, 0, 1), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(of(2, 1, 2), std::vector<int>{1});
  EXPECT_EQ(of(8, 1, 4), (std::vector<int>{2, 3}));
  EXPECT_EQ(of(2, 3, 4), std::vector<int>{1});
  for (int g = 0; g < 5; ++g) {
    int owners = 0;
    for (int rank = 0; rank < 3; ++rank) owners += own_gpu(g, 5, rank, 3);
    EXPECT_EQ(owners, 1) << g;
  }
}

}  // namespace device_runtime_test
}  // namespace emend::devices
