// The NCCL plug-in: its loader, and how a group of processes agrees to use it. Without GPUs a stand-in
// (nccl_stand_in.cpp) works on the memory of simulated devices. As in device_collectives_test, the test starts itself
// once a rank, with EMEND_NCCL_SCENARIO naming what the child does.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <emend/core/text.h>
#include <emend/devices/collectives.h>
#include <emend/devices/detail/nccl_library.h>
#include <emend/devices/runtime.h>
#include <emend/editors/detail/statistics_parts.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <mutex>
#include <thread>

#include "support/debug_models.h"
#include "support/error_of.h"
#include "support/group_children.h"
#include "support/spread_plan.h"

namespace emend::devices {
namespace nccl_plugin_test {

using testing::expect_sums, testing::sim;

constexpr char kStandIn[] = EMEND_BINARY_DIR "/tests/libemend_nccl_stand_in.so";
constexpr char kOtherAbi[] = EMEND_BINARY_DIR "/tests/libemend_nccl_other_abi.so";

// ---- what a child does ----------------------------------------------------------------------------------------------

class Lines final : public LogSink {
 public:
  void write(const LogEvent& event) override {
    const std::lock_guard lock(mutex_);
    events.push_back(event);
  }
  std::vector<LogEvent> events;

 private:
  std::mutex mutex_;
};

/// Sums and communicators of the stand-in in this process; zeros where it is not loaded.
std::array<int, 2> counts() {
  std::array<int, 2> result{};
  if (void* library = dlopen(kStandIn, RTLD_NOW | RTLD_NOLOAD))
    reinterpret_cast<void (*)(int*)>(dlsym(library, "emend_stand_in_counts"))(result.data());
  return result;
}

void expect_failure(Collectives& group, const std::string& part) {
  auto t = at::ones({1000}, at::kDouble).to(sim(group.rank()));
  for (const std::string& reason : {part, std::string("an earlier call failed")}) {
    testing::expect_error(ErrorClass::kDevice, {"process " + std::to_string(group.rank()) + " of ", reason},
                          [&] { group.all_reduce_sum(t); });
    EXPECT_EQ(counts()[1], 0) << "the communicator is still there";
  }
}

/// Key statistics of processes with a GPU each: one sum a layer, which does not pass through the host.
void expect_sums_on_devices(Collectives& group) {
  const std::vector<std::vector<int64_t>> rows = {{3, 5, 7, 9, 11}, {4, 6, 8}, {1, 2, 3, 4}};
  const auto sums_of = [&](c10::Device device, Collectives* processes) {
    const auto model = testing::debug_model("llama", 1, "", {.place = testing::over_devices({device})});
    std::vector<editors::detail::Sums> sums(1);
    editors::StatisticsOptions settings;
    settings.batch_tokens = 5;
    editors::detail::add_rows(model, rows, {0, 1}, settings, processes, sums, [](int64_t) {});
    return editors::detail::total_of(model, sums[0], {0, 1}, processes);
  };
  const auto before = counts();
  const auto together = sums_of(sim(group.rank()), &group);
  EXPECT_EQ(counts()[0], before[0] + 2);
  const auto alone = sums_of(at::kCPU, nullptr);
  EXPECT_EQ(together.count, alone.count);
  for (const int layer : {0, 1})
    EXPECT_TRUE(at::allclose(together.sums_FF.at(layer), alone.sums_FF.at(layer), 1e-6, 1e-9)) << layer;
}

TEST(Child, Run) {
  const auto what = environment("EMEND_NCCL_SCENARIO");
  if (what.empty()) GTEST_SKIP() << "this is the part of the other tests that runs in child processes";
  const auto sink = std::make_shared<Lines>();
  const std::chrono::seconds call(what == "stall" ? 3 : 60);
  const auto group = join_processes(read_process_environment(), {std::chrono::seconds(60), call}, Log({sink}));
  const int r = group->rank();
  if (what == "nccl") {
    expect_sums(*group, sim(r));
    EXPECT_EQ(counts(), (std::array<int, 2>{7, 1}));
    const auto before = counts();
    expect_sums(*group, at::kCPU);
    expect_sums(*group, sim(1));                                  // all on one device: none has one of its own
    expect_sums(*group, r == 0 ? at::Device(at::kCPU) : sim(r));  // one on the host
    EXPECT_EQ(counts(), before);
    expect_sums(*group, sim(group->size() - r));  // other devices: another communicator
    EXPECT_EQ(counts()[1], 2);
  } else if (what == "statistics") {
    expect_sums_on_devices(*group);
  } else if (what == "gloo" || what == "gloo-warned") {
    expect_sums(*group, sim(r));
    EXPECT_EQ(counts()[0], 0);
  } else if (what == "fail") {
    expect_failure(*group, r == 1 ? "the stand-in was told to fail" : "process 1 failed");
  } else if (what == "stall") {
    expect_failure(*group, "over NCCL");
  } else if (what == "exit") {
    expect_failure(*group, "an answer from every process");
  } else {
    FAIL() << what;
  }
  // One line, whatever came of it; a warning only where a file was named that is of no use.
  ASSERT_EQ(sink->events.size(), 1U);
  EXPECT_EQ(sink->events[0].level, what == "gloo-warned" ? LogLevel::kWarning : LogLevel::kDebug);
}

// ---- what the parent does -------------------------------------------------------------------------------------------

/// Exit codes of a group of `size`; `plugins` holds EMEND_NCCL_PLUGIN of each rank, the last one that of the rest.
std::vector<int> run_group(const std::string& what, int size, const std::vector<std::string>& plugins,
                           const std::string& order = "") {
  testing::ProcessesOptions options;
  options.program.environment = {{"EMEND_NCCL_SCENARIO", what}, {"EMEND_STAND_IN", order}, {"OMP_NUM_THREADS", "1"}};
  for (int r = 0; r < size; ++r)
    options.environment_of_rank[r]["EMEND_NCCL_PLUGIN"] = plugins[std::min(static_cast<size_t>(r), plugins.size() - 1)];
  return testing::run_children(size, options);
}

const std::vector<int> kBoth{0, 0};

TEST(NcclPlugin, IsUsedByProcessesThatAllHaveItAndAGpuOfTheirOwn) {
  EXPECT_EQ(run_group("nccl", 2, {kStandIn}), kBoth);
  EXPECT_EQ(run_group("nccl", 3, {kStandIn}), (std::vector<int>{0, 0, 0}));
}

TEST(NcclPlugin, AddsUpStatisticsOnTheDevices) {
  EXPECT_EQ(run_group("statistics", 2, {kStandIn}), kBoth);
}

TEST(NcclPlugin, IsNotUsedWhereOneProcessIsWithout) {
  EXPECT_EQ(run_group("gloo", 2, {kStandIn, "none"}), kBoth);
  EXPECT_EQ(run_group("gloo", 2, {"none", kStandIn}), kBoth);
}

TEST(NcclPlugin, ThatIsMissingOrOfAnotherVersionIsNoError) {
  EXPECT_EQ(run_group("gloo", 2, {""}), kBoth);
  EXPECT_EQ(run_group("gloo-warned", 2, {"/nowhere/libemend_nccl.so"}), kBoth);
  EXPECT_EQ(run_group("gloo-warned", 2, {kOtherAbi}), kBoth);
}

TEST(NcclPlugin, FailureInOneProcessIsAnErrorInAll) {
  EXPECT_EQ(run_group("fail", 2, {kStandIn}, "fail:1"), kBoth);
}

TEST(NcclPlugin, WorkThatNeverEndsIsGivenUpInTime) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(run_group("stall", 2, {kStandIn}, "stall:1"), kBoth);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(40));
}

TEST(NcclPlugin, AProcessThatEndsInASumEndsTheOthers) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(run_group("exit", 2, {kStandIn}, "exit:1"), (std::vector<int>{0, 42}));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST(NcclPlugin, TheLoaderSaysWhatItFound) {
  using detail::open_nccl_plugin;
  const auto stand_in = open_nccl_plugin(kStandIn);
  ASSERT_TRUE(stand_in.plugin) << stand_in.text;
  EXPECT_EQ(stand_in.plugin->abi, kNcclPluginAbi);
  EXPECT_EQ(stand_in.text, std::string("NCCL 1.2.3 through ") + kStandIn);
  const auto missing = open_nccl_plugin("/nowhere/libemend_nccl.so");
  EXPECT_FALSE(missing.plugin);
  EXPECT_NE(missing.text.find("/nowhere/libemend_nccl.so"), std::string::npos) << missing.text;
  const auto other = open_nccl_plugin(kOtherAbi);
  EXPECT_FALSE(other.plugin);
  EXPECT_NE(other.text.find("has version 999 of the interface and this program 2"), std::string::npos) << other.text;
  const auto no_plugin = open_nccl_plugin("libm.so.6");
  EXPECT_FALSE(no_plugin.plugin);
  EXPECT_NE(no_plugin.text.find("it has no emend_nccl_plugin"), std::string::npos) << no_plugin.text;
}

TEST(NcclPlugin, TheRealOneLoadsAndKnowsItsVersion) {
#ifdef EMEND_NCCL_LIBRARY
  const auto real = detail::open_nccl_plugin(EMEND_NCCL_LIBRARY);
  ASSERT_TRUE(real.plugin) << real.text;
  EXPECT_EQ(real.plugin->memory, NcclMemory::kCuda);
  EXPECT_GE(real.plugin->version(), 21400) << "non-blocking communicators came with 2.14";
  std::cout << real.text << "\n";
#else
  GTEST_SKIP() << "needs a build with -DEMEND_WITH_NCCL=ON, and so CUDA's and NCCL's headers and libraries";
#endif
}

TEST(NcclPlugin, OneRankOnAGpuSumsToItself) {
  if (load_cuda_runtime().devices == 0) GTEST_SKIP() << "needs a CUDA device: " << load_cuda_runtime().reason;
  const auto* plugin = detail::nccl_plugin({});
  if (!plugin) GTEST_SKIP() << "needs a build with -DEMEND_WITH_NCCL=ON";
  const c10::Device gpu(c10::kCUDA, 0);
  std::string id(kNcclIdBytes, '\0');
  ASSERT_EQ(plugin->unique_id(id.data()), 0) << plugin->last_error();
  detail::NcclGroup group(gpu, *plugin);
  const auto wait = [&] {
    while (group.poll() == NcclState::kRunning) std::this_thread::yield();
    EXPECT_EQ(group.poll(), NcclState::kDone) << group.last_error();
  };
  ASSERT_EQ(group.join(id, 0, 1), 0) << group.last_error();
  wait();
  at::Tensor sum = at::arange(1000, at::TensorOptions(gpu).dtype(at::kDouble));
  ASSERT_EQ(group.all_reduce_sum(sum), 0) << group.last_error();
  wait();
  EXPECT_TRUE(at::equal(sum.cpu(), at::arange(1000, at::kDouble)));
}

}  // namespace nccl_plugin_test
}  // namespace emend::devices
