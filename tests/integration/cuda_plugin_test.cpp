// The CUDA plug-in builds where nvcc is, with warnings as errors, and what programs say of one.
#include <emend/core/atomic_file.h>
#include <emend/devices/kernels.h>
#include <emend/devices/plugins/kernel_plugin.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "support/program.h"
#include "support/temporary_folder.h"

namespace emend {
namespace cuda_plugin_test {

using testing::run_program;

bool has_nvcc() {
  std::string folders = std::getenv("PATH") ? std::getenv("PATH") : "";
  if (const char* home = std::getenv("CUDA_HOME")) folders += std::string(":") + home + "/bin";
  std::istringstream all(folders + ":/usr/local/cuda/bin");
  for (std::string folder; std::getline(all, folder, ':');)
    if (std::filesystem::exists(std::filesystem::path(folder) / "nvcc")) return true;
  return false;
}

TEST(CudaPlugin, CompilesAndLinksWithoutWarnings) {
  if (!has_nvcc()) GTEST_SKIP() << "needs nvcc on the path or in /usr/local/cuda/bin";
  const testing::TemporaryFolder folder("cuda-plugin");
  const auto build = (folder.path() / "build").string();
  const auto configured = run_program("/usr/bin/env", {"cmake", "-S", EMEND_SOURCE_DIR "/devices/plugins/cuda", "-B",
                                                       build, "-DCMAKE_CUDA_ARCHITECTURES=90"});
  ASSERT_EQ(configured.status, 0) << configured.err;
  const auto built = run_program("/usr/bin/env", {"cmake", "--build", build});
  ASSERT_EQ(built.status, 0) << built.out << built.err;
  std::string text;
  const auto* plugin = devices::open_kernel_plugin(build + "/bin/libemend_cuda.so", text);
  ASSERT_TRUE(plugin) << text;
  EXPECT_EQ(plugin->memory, devices::KernelMemory::kCuda);
  for (const int device : {0, 64}) {  // one that there is not, at least
    devices::AddRmsNorm nothing{};
    const int status = plugin->add_rms_norm(nothing, devices::KernelDtype::kFloat32, {device, nullptr});
    EXPECT_EQ(status != 0, std::string(plugin->last_error()) != "");
    EXPECT_TRUE(device != 64 || status != 0) << "a failure is reported";
  }
}

TEST(CudaPlugin, DoctorComparesItsKernels) {
  testing::ProgramOptions options;
  options.environment = {{"EMEND_CUDA_PLUGIN", EMEND_BINARY_DIR "/tests/libemend_kernels_stand_in.so"}};
  const std::vector<std::string> words = {"doctor", "--full", "--json", "--quiet", "--device-map", "cpu"};
  const auto result = run_program("emend", words, options);
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const auto document = nlohmann::json::parse(result.out);
  int kernels = 0, timed = 0;
  for (const auto& check : document["checks"])
    if (check["name"].get<std::string>().starts_with("kernel: ")) {
      ++kernels;
      EXPECT_EQ(check["status"], "ok") << check;
    }
  for (const auto& row : document["timings"]) timed += row["name"].get<std::string>().ends_with(", own kernel");
  EXPECT_EQ(kernels, 9) << "five in float32, four in bfloat16";
  EXPECT_EQ(timed, kernels);
  options.environment["EMEND_CUDA_PLUGIN"] = "/nowhere/libemend_cuda.so";
  const auto missing = run_program("emend", words, options);
  EXPECT_EQ(missing.status, 5) << missing.err;
  for (const char* part : {"EMEND_CUDA_PLUGIN=/nowhere/libemend_cuda.so", "-DEMEND_WITH_CUDA=ON"})
    EXPECT_NE((missing.out + missing.err).find(part), std::string::npos) << missing.out << missing.err;
}

}  // namespace cuda_plugin_test
}  // namespace emend
