#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/device_map.h>
#include <emend/devices/lanes.h>
#include <emend/devices/placement.h>
#include <emend/devices/runtime.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <set>
#include <thread>

namespace emend::devices {
namespace device_runtime_test {

TEST(CudaRuntime, IsNotOpenedUnasked) {
  (void)visible_devices();
  (void)device_memory_stats(c10::Device(c10::kCPU));
  EXPECT_FALSE(cuda_runtime_was_asked());
}

class Threads {
 public:
  explicit Threads(int n) { at::set_num_threads(n); }
  ~Threads() { at::set_num_threads(before_); }

 private:
  int before_ = at::get_num_threads();
};

TEST(Lanes, RunEveryItemOnceInThreadsOfOneThread) {
  for (const int threads : {1, 2, 5}) {
    const Threads scope(threads);
    const at::NoGradGuard no_grad;
    const auto caller = std::this_thread::get_id();
    std::vector<int> runs(20, 0), width(20, 0), grad(20, 1), nested(20, 0);
    std::vector<size_t> told;
    run_on_lanes(20, [&](size_t i) {
      ++runs[i];
      width[i] = at::get_num_threads();
      grad[i] = at::GradMode::is_enabled();
      const auto here = std::this_thread::get_id();
      run_on_lanes(3, [&, here, i](size_t) { nested[i] += std::this_thread::get_id() == here; });
      on_caller([&, i] {
        EXPECT_EQ(std::this_thread::get_id(), caller);
        told.push_back(i);
      });
    });
    EXPECT_EQ(runs, std::vector<int>(20, 1)) << threads;
    EXPECT_EQ(width, std::vector<int>(20, 1)) << threads;
    EXPECT_EQ(grad, std::vector<int>(20, 0)) << threads;
    EXPECT_EQ(nested, std::vector<int>(20, 3)) << threads;
    EXPECT_EQ(std::set<size_t>(told.begin(), told.end()).size(), 20U);
    EXPECT_EQ(at::get_num_threads(), threads);
    int fresh = 0;
    std::thread([&] { fresh = at::get_num_threads(); }).join();
    EXPECT_EQ(fresh, threads) << "lanes leave the program's own number alone";
  }
}

TEST(Lanes, RunSideBySideAndNoMoreThanAllowed) {
  const Threads scope(4);
  for (const size_t most : {0, 1, 2}) {
    std::atomic<int> now = 0, highest = 0;
    run_on_lanes(
        8,
        [&](size_t) {
          int seen = highest, mine = ++now;
          while (mine > seen && !highest.compare_exchange_weak(seen, mine)) {
          }
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          --now;
        },
        most);
    if (most > 0) EXPECT_LE(highest, static_cast<int>(most));
    if (most != 1) EXPECT_GE(highest, 2);
  }
}

TEST(Lanes, ThrowTheFirstItemsErrorAndBeginNoMore) {
  for (const int threads : {1, 3}) {
    const Threads scope(threads);
    std::atomic<int> begun = 0;
    const auto run = [&](bool on_the_caller) {
      begun = 0;
      run_on_lanes(1000, [&](size_t i) {
        ++begun;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const auto fail = [] { throw Error(ErrorClass::kNumeric, {"item", "a failure", "none", ""}); };
        if (i == 2 && on_the_caller) on_caller(fail);
        if (i >= 2 && !on_the_caller) fail();
      });
    };
    EXPECT_THROW(run(false), Error) << threads;
    EXPECT_LT(begun, 10) << threads;
    EXPECT_THROW(run(true), Error) << threads;
    EXPECT_LT(begun, 500) << threads;
  }
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
  if (!runtime.driver) EXPECT_FALSE(runtime.loaded);
  if (!runtime.driver) EXPECT_NE(runtime.reason.find("no NVIDIA driver"), std::string::npos) << runtime.reason;
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
