// Groups of real processes. The test starts itself again, once a rank, with EMEND_COLLECTIVES_SCENARIO naming what the
// child does (see Child.Run); the parent looks at exit codes and times.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/devices/collectives.h>
#include <emend/devices/work_sharing.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "support/error_of.h"
#include "support/group_children.h"
#include "support/simulated.h"

namespace emend::devices {
namespace device_collectives_test {

using testing::expect_error;

// ---- what a child does ----------------------------------------------------------------------------------------------

void exchanges(Collectives& group) {
  const int n = group.size(), r = group.rank();
  const auto texts = group.all_gather(std::string(static_cast<size_t>(r) * 3, 'x') + (r ? std::string(1, '\0') : ""));
  ASSERT_EQ(texts.size(), static_cast<size_t>(n));
  for (int k = 0; k < n; ++k) EXPECT_EQ(texts[static_cast<size_t>(k)].size(), static_cast<size_t>(k ? 3 * k + 1 : 0));
  EXPECT_EQ(group.all_gather(std::string_view())[0], "");
}

void meet(Collectives& group) {
  // Rank 0 comes late; nobody may pass before it.
  const auto start = std::chrono::steady_clock::now();
  if (group.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  group.barrier();
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(250));
}

void measure(Collectives& group) {
  auto t = at::ones({1536, 1536}, at::kDouble);
  group.all_reduce_sum(t);
  const auto start = std::chrono::steady_clock::now();
  constexpr int kTimes = 5;
  for (int i = 0; i < kTimes; ++i) group.all_reduce_sum(t);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  if (group.rank() == 0)
    std::cout << group.size() << " processes: sum of a 1536 x 1536 float64 matrix " << took.count() / kTimes << " ms"
              << std::endl;
}

/// A lost process must show as Error(kDevice) in the others, now and for ever.
void expect_loss(Collectives& group) {
  auto t = at::ones({1000}, at::kDouble);
  for (int i = 0; i < 2; ++i)
    expect_error(ErrorClass::kDevice, {"process " + std::to_string(group.rank()) + " of "},
                 [&] { group.all_reduce_sum(t); });
}

void mismatch(Collectives& group) {
  auto t = at::ones({group.rank() + 1}, at::kDouble);
  expect_error(ErrorClass::kInvalidArgument, {},
               [&] { group.rank() == 0 ? group.barrier() : group.all_reduce_sum(t); });
}

// A failure in one process is the failure of all, and the group goes on.
void share(Collectives& group) {
  const WorkSharing sharing(group);
  const int r = group.rank(), n = group.size();
  const auto work = [&]() -> std::string {
    if (r == 1) throw Error(ErrorClass::kNumeric, {"", "a system that is singular", "", ""});
    return "fine";
  };
  const auto text = testing::error_of([&] { (void)sharing.exchange(work); }, ErrorClass::kNumeric);
  testing::expect_parts(text, {"a system that is singular"});
  EXPECT_EQ(text.find("process 1 of") != std::string::npos, r != 1) << text;
  EXPECT_EQ(sharing.by_first([&] { return "from " + std::to_string(r); }), "from 0");
  EXPECT_TRUE(sharing.all(true));
  EXPECT_FALSE(sharing.all(r != 1));
  EXPECT_TRUE(sharing.equal("same"));
  EXPECT_FALSE(sharing.equal(std::to_string(r)));
  const std::vector<int64_t> costs(7, 1);
  int worked = 0;
  const auto all = sharing.map(costs, [&](ItemRange range) {
    std::vector<int> out;
    for (size_t i = range.begin; i < range.end; ++i, ++worked) out.push_back(static_cast<int>(10 * i));
    return out;
  });
  EXPECT_EQ(all, (std::vector<int>{0, 10, 20, 30, 40, 50, 60}));
  EXPECT_NEAR(worked, 7.0 / n, 1);
}

void missing() {
  expect_error(ErrorClass::kDevice, {"all 2 processes"}, [] {
    (void)join_processes(read_process_environment(), {std::chrono::seconds(2), std::chrono::seconds(2)});
  });
}

TEST(Child, Run) {
  const auto what = environment("EMEND_COLLECTIVES_SCENARIO");
  if (what.empty()) GTEST_SKIP() << "this is the part of the other tests that runs in child processes";
  if (what == "missing") return missing();
  const auto group = join_processes(read_process_environment(), {std::chrono::seconds(60), std::chrono::seconds(60)});
  if (what == "work") {
    testing::expect_sums(*group, at::kCPU);
    testing::expect_sums(*group, testing::sim(1));
    exchanges(*group);
    meet(*group);
    share(*group);
    measure(*group);
  } else if (what == "death") {
    group->barrier();
    if (group->rank() == 1) _exit(42);
    expect_loss(*group);
  } else if (what == "mismatch") {
    mismatch(*group);
  } else {
    FAIL() << what;
  }
}

// ---- what the parent does -------------------------------------------------------------------------------------------

testing::ProcessesOptions told_to(const std::string& what) {
  testing::ProcessesOptions options;
  options.program.environment = {{"EMEND_COLLECTIVES_SCENARIO", what}, {"OMP_NUM_THREADS", "1"}};
  return options;
}

std::vector<int> run_group(const std::string& what, int size) {
  return testing::run_children(size, told_to(what));
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(Collectives, TwoProcessesWork) {
  EXPECT_EQ(run_group("work", 2), (std::vector<int>{0, 0}));
}

TEST(Collectives, ThreeProcessesWork) {
  EXPECT_EQ(run_group("work", 3), (std::vector<int>{0, 0, 0}));
}

TEST(Collectives, ADeadProcessEndsTheOthersWithinSeconds) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(run_group("death", 3), (std::vector<int>{0, 42, 0}));
  const double seconds = seconds_since(begin);
  std::cout << "from start to the last error: " << seconds << " s\n";
  EXPECT_LT(seconds, 20);
}

TEST(Collectives, CallsThatDoNotMatchAreRefusedEverywhere) {
  EXPECT_EQ(run_group("mismatch", 3), (std::vector<int>{0, 0, 0}));
}

TEST(Collectives, AProcessThatNeverComesIsAnErrorInTime) {
  auto options = told_to("missing");
  options.program.environment.insert({{"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}});
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(testing::run_children(1, options), std::vector<int>{0});
  EXPECT_LT(seconds_since(begin), 30);
}

TEST(Collectives, AloneNeedsNoGroup) {
  EXPECT_EQ(join_processes({}), nullptr);
}

TEST(Collectives, WorksUnderMpirun) {
  if (testing::path_of("mpirun").empty()) GTEST_SKIP() << "needs mpirun (Debian: openmpi-bin)";
  const auto results = testing::run_processes(testing::Launcher::kMpirun, 2, testing::own_program(),
                                              testing::kChildAlone, told_to("work"));
  EXPECT_EQ(results[0].status, 0) << results[0].out << results[0].err;
}

TEST(Collectives, WorksUnderTorchrun) {
  const auto torchrun = testing::path_of("torchrun");
  if (torchrun.empty()) GTEST_SKIP() << "needs torchrun (a full Python torch)";
  std::vector<std::string> arguments{
      "--no-python",         "--nproc-per-node", "2", "--master-port", std::to_string(testing::free_port()),
      testing::own_program()};
  arguments.insert(arguments.end(), testing::kChildAlone.begin(), testing::kChildAlone.end());
  const auto result = testing::run_program(torchrun, arguments, told_to("work").program);
  EXPECT_EQ(result.status, 0) << result.out << result.err;
}

}  // namespace device_collectives_test
}  // namespace emend::devices
