#include <ATen/Context.h>
#include <emend/core/atomic_file.h>
#include <emend/devices/detail/control_group.h>
#include <emend/devices/device_map.h>
#include <emend/devices/placement.h>
#include <emend/devices/runtime.h>
#include <gtest/gtest.h>

#include "support/error_of.h"
#include "support/temporary_folder.h"

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
  if (runtime.devices == 0)
    testing::expect_error(ErrorClass::kDevice, {runtime.reason},
                          [] { (void)device_memory_stats(c10::Device(c10::kCUDA, 0)); });
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

// The group of a process may be any below the root: a job of Slurm, a unit of systemd.
TEST(ControlGroups, TheTightestOfAllAboveLimits) {
  constexpr int64_t kMiB = 1 << 20;
  const testing::TemporaryFolder folder("groups");
  const auto file = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories((folder.path() / name).parent_path());
    write_file(folder.path() / name, text);
  };
  const auto limits = [&] { return detail::control_groups(folder.path()); };
  EXPECT_EQ(limits().memory_bytes, 0);
  EXPECT_EQ(limits().processors, 0);

  file("proc/self/cgroup", "0::/slurm/job_1/step_0\n");
  file("sys/fs/cgroup/slurm/job_1/step_0/memory.max", "max\n");
  file("sys/fs/cgroup/slurm/job_1/step_0/cpu.max", "max 100000\n");
  file("sys/fs/cgroup/slurm/job_1/memory.max", std::to_string(80 * kMiB) + "\n");
  file("sys/fs/cgroup/slurm/job_1/memory.current", std::to_string(50 * kMiB) + "\n");
  file("sys/fs/cgroup/slurm/job_1/memory.stat",
       "anon 7\ninactive_file " + std::to_string(8 * kMiB) + "\nactive_file " + std::to_string(2 * kMiB) + "\n");
  file("sys/fs/cgroup/slurm/job_1/cpu.max", "250000 100000\n");
  file("sys/fs/cgroup/slurm/memory.max", std::to_string(90 * kMiB) + "\n");
  file("sys/fs/cgroup/slurm/memory.current", std::to_string(85 * kMiB) + "\n");
  file("sys/fs/cgroup/slurm/cpu.max", "800000 100000\n");
  EXPECT_EQ(limits().memory_bytes, 80 * kMiB);
  EXPECT_EQ(limits().free_bytes, 5 * kMiB) << "of the group above, which others use too";
  EXPECT_EQ(limits().processors, 2.5);

  // A container sees its own group at the root, whatever the path is outside.
  file("proc/self/cgroup", "0::/../docker/abc\n");
  EXPECT_EQ(limits().memory_bytes, 0);
  file("sys/fs/cgroup/memory.max", std::to_string(60 * kMiB) + "\n");
  EXPECT_EQ(limits().memory_bytes, 60 * kMiB);
  EXPECT_EQ(limits().free_bytes, 60 * kMiB);

  // The first version, a hierarchy for each controller.
  file("proc/self/cgroup", "9:cpu,cpuacct:/user\n4:memory:/slurm/job_2\n0::/\n");
  file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  file("sys/fs/cgroup/memory/slurm/job_2/memory.limit_in_bytes", std::to_string(40 * kMiB) + "\n");
  file("sys/fs/cgroup/memory/slurm/job_2/memory.usage_in_bytes", std::to_string(10 * kMiB) + "\n");
  file("sys/fs/cgroup/memory/slurm/job_2/memory.stat",
       "inactive_file 1\ntotal_inactive_file " + std::to_string(4 * kMiB) + "\n");
  file("sys/fs/cgroup/cpu/user/cpu.cfs_quota_us", "150000\n");
  file("sys/fs/cgroup/cpu/user/cpu.cfs_period_us", "100000\n");
  file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(limits().memory_bytes, 40 * kMiB);
  EXPECT_EQ(limits().free_bytes, 34 * kMiB);
  EXPECT_EQ(limits().processors, 1.5);
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
