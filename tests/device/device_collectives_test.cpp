// Groups of real processes. The test starts itself again, once a rank, with EMEND_COLLECTIVES_SCENARIO naming what the
// child does (see Child.Run); the parent looks at exit codes and times.
#include <ATen/ATen.h>
#include <arpa/inet.h>
#include <emend/core/error.h>
#include <emend/devices/collectives.h>
#include <emend/devices/work_sharing.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "support/simulated.h"

extern char** environ;

namespace emend::devices {
namespace device_collectives_test {

const char* scenario() {
  return std::getenv("EMEND_COLLECTIVES_SCENARIO");
}

// ---- what a child does ----------------------------------------------------------------------------------------------

void sums(Collectives& group) {
  const int n = group.size(), r = group.rank();
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kLong, at::kInt}) {
    auto t = at::full({3, 2}, r + 1, dtype);
    group.all_reduce_sum(t);
    EXPECT_TRUE(at::equal(t, at::full({3, 2}, n * (n + 1) / 2, dtype))) << t;
  }
  // Rounded once: in float32, 1e8 + 1 + 1 is 1e8.
  auto big = at::full({1}, r == 0 ? 1e8 : 4.0, at::kFloat);
  group.all_reduce_sum(big);
  EXPECT_EQ(big.item<float>(), static_cast<float>(1e8 + 4.0 * (n - 1)));
  // In place through a view, on another device, and empty.
  auto base = at::zeros({4, 4}, at::kDouble);
  auto column = base.select(1, 2);
  column.fill_(1);
  group.all_reduce_sum(column);
  EXPECT_EQ(base.sum().item<double>(), 4.0 * n);
  auto on_device = at::ones({5}, at::kDouble).to(testing::sim(1));
  group.all_reduce_sum(on_device);
  EXPECT_EQ(on_device.device(), testing::sim(1));
  EXPECT_EQ(on_device.sum().item<double>(), 5.0 * n);
  auto none = at::empty({0}, at::kDouble);
  group.all_reduce_sum(none);
}

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
  for (int i = 0; i < 2; ++i) try {
      auto t = at::ones({1000}, at::kDouble);
      group.all_reduce_sum(t);
      ADD_FAILURE() << "the sum went through without one process";
    } catch (const Error& error) {
      EXPECT_EQ(error.error_class(), ErrorClass::kDevice) << error.what();
      EXPECT_NE(std::string(error.what()).find("process " + std::to_string(group.rank()) + " of "), std::string::npos);
      std::cout << error.what() << std::endl;
    }
}

void mismatch(Collectives& group) {
  try {
    if (group.rank() == 0) {
      group.barrier();
    } else {
      auto t = at::ones({group.rank() + 1}, at::kDouble);
      group.all_reduce_sum(t);
    }
    ADD_FAILURE() << "calls that do not match went through";
  } catch (const Error& error) {
    EXPECT_EQ(error.error_class(), ErrorClass::kInvalidArgument) << error.what();
  }
}

// A failure in one process is the failure of all, and the group goes on.
void share(Collectives& group) {
  const WorkSharing sharing(group);
  const int r = group.rank(), n = group.size();
  try {
    (void)sharing.exchange([&]() -> std::string {
      if (r == 1) throw Error(ErrorClass::kNumeric, "a system that is singular");
      return "fine";
    });
    ADD_FAILURE() << "the failure of process 1 went unnoticed";
  } catch (const Error& error) {
    EXPECT_EQ(error.error_class(), ErrorClass::kNumeric);
    const std::string text = error.what();
    EXPECT_NE(text.find("a system that is singular"), std::string::npos) << text;
    EXPECT_EQ(text.find("process 1 of") != std::string::npos, r != 1) << text;
  }
  EXPECT_EQ(sharing.by_first([&] { return "from " + std::to_string(r); }), "from 0");
  EXPECT_TRUE(sharing.all(true));
  EXPECT_FALSE(sharing.all(r != 1));
  EXPECT_TRUE(sharing.equal("same"));
  EXPECT_FALSE(sharing.equal(std::to_string(r)));
  const std::vector<int64_t> costs(7, 1);
  int worked = 0;
  const auto all = sharing.map<int>(
      costs,
      [&](ItemRange range) {
        std::vector<int> out;
        for (size_t i = range.begin; i < range.end; ++i, ++worked) out.push_back(static_cast<int>(10 * i));
        return out;
      },
      [](const std::vector<int>& values) {
        return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int));
      },
      [](std::string_view bytes) {
        std::vector<int> values(bytes.size() / sizeof(int));
        std::memcpy(values.data(), bytes.data(), bytes.size());
        return values;
      });
  EXPECT_EQ(all, (std::vector<int>{0, 10, 20, 30, 40, 50, 60}));
  EXPECT_NEAR(worked, 7.0 / n, 1);
}

void missing() {
  try {
    (void)join_processes(read_process_environment(), {std::chrono::seconds(2), std::chrono::seconds(2)});
    ADD_FAILURE() << "joined a group whose other process never came";
  } catch (const Error& error) {
    EXPECT_EQ(error.error_class(), ErrorClass::kDevice);
    EXPECT_NE(std::string(error.what()).find("all 2 processes"), std::string::npos) << error.what();
  }
}

TEST(Child, Run) {
  if (!scenario()) GTEST_SKIP() << "this is the part of the other tests that runs in child processes";
  const std::string what = scenario();
  if (what == "missing") return missing();
  const auto group = join_processes(read_process_environment(), {std::chrono::seconds(60), std::chrono::seconds(60)});
  if (what == "work") {
    sums(*group);
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

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  close(fd);
  return ntohs(address.sin_port);
}

pid_t start(const std::vector<std::string>& command, const std::vector<std::string>& variables) {
  std::vector<char*> arguments, values;
  for (const auto& a : command) arguments.push_back(const_cast<char*>(a.c_str()));
  for (const auto& v : variables) values.push_back(const_cast<char*>(v.c_str()));
  for (char** e = environ; *e; ++e) values.push_back(*e);
  arguments.push_back(nullptr);
  values.push_back(nullptr);
  pid_t child = 0;
  EXPECT_EQ(posix_spawnp(&child, arguments[0], nullptr, nullptr, arguments.data(), values.data()), 0) << command[0];
  return child;
}

std::vector<std::string> own_command() {
  return {std::filesystem::read_symlink("/proc/self/exe"), "--gtest_filter=Child.Run", "--gtest_brief=1"};
}

int exit_code(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/// Exit codes of `count` children of a group of `size`, and the seconds they took.
std::pair<std::vector<int>, double> run_group(const std::string& what, int size, int count) {
  const auto port = std::to_string(free_port());
  std::vector<pid_t> children;
  const auto begin = std::chrono::steady_clock::now();
  for (int r = 0; r < count; ++r)
    children.push_back(start(own_command(), {"EMEND_COLLECTIVES_SCENARIO=" + what, "RANK=" + std::to_string(r),
                                             "WORLD_SIZE=" + std::to_string(size), "MASTER_ADDR=127.0.0.1",
                                             "MASTER_PORT=" + port, "OMP_NUM_THREADS=1"}));
  std::vector<int> codes;
  for (const auto child : children) codes.push_back(exit_code(child));
  return {codes, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()};
}

bool is_child() {
  return scenario() != nullptr;
}

TEST(Collectives, TwoProcessesWork) {
  if (is_child()) GTEST_SKIP();
  EXPECT_EQ(run_group("work", 2, 2).first, (std::vector<int>{0, 0}));
}

TEST(Collectives, ThreeProcessesWork) {
  if (is_child()) GTEST_SKIP();
  EXPECT_EQ(run_group("work", 3, 3).first, (std::vector<int>{0, 0, 0}));
}

TEST(Collectives, ADeadProcessEndsTheOthersWithinSeconds) {
  if (is_child()) GTEST_SKIP();
  const auto [codes, seconds] = run_group("death", 3, 3);
  EXPECT_EQ(codes, (std::vector<int>{0, 42, 0}));
  std::cout << "from start to the last error: " << seconds << " s\n";
  EXPECT_LT(seconds, 20);
}

TEST(Collectives, CallsThatDoNotMatchAreRefusedEverywhere) {
  if (is_child()) GTEST_SKIP();
  EXPECT_EQ(run_group("mismatch", 3, 3).first, (std::vector<int>{0, 0, 0}));
}

TEST(Collectives, AProcessThatNeverComesIsAnErrorInTime) {
  if (is_child()) GTEST_SKIP();
  const auto [codes, seconds] = run_group("missing", 2, 1);
  EXPECT_EQ(codes, std::vector<int>{0});
  EXPECT_LT(seconds, 30);
}

TEST(Collectives, AloneNeedsNoGroup) {
  const auto group = join_processes({});
  EXPECT_EQ(group->size(), 1);
  auto t = at::full({2}, 3.0);
  group->all_reduce_sum(t);
  group->barrier();
  EXPECT_TRUE(at::equal(t, at::full({2}, 3.0)));
  EXPECT_EQ(group->all_gather("abc"), std::vector<std::string>{"abc"});
}

bool on_path(const std::string& program) {
  return std::system(("command -v " + program + " > /dev/null 2>&1").c_str()) == 0;
}

TEST(Collectives, WorksUnderMpirun) {
  if (is_child()) GTEST_SKIP();
  if (!on_path("mpirun")) GTEST_SKIP() << "needs mpirun (Debian: openmpi-bin)";
  std::vector<std::string> command{"mpirun", "--oversubscribe", "--allow-run-as-root", "-n", "2"};
  for (const auto& part : own_command()) command.push_back(part);
  EXPECT_EQ(exit_code(start(command, {"EMEND_COLLECTIVES_SCENARIO=work", "OMP_NUM_THREADS=1"})), 0);
}

TEST(Collectives, WorksUnderTorchrun) {
  if (is_child()) GTEST_SKIP();
  if (!on_path("torchrun")) GTEST_SKIP() << "needs torchrun (a full Python torch)";
  std::vector<std::string> command{"torchrun", "--no-python",   "--nproc-per-node",
                                   "2",        "--master-port", std::to_string(free_port())};
  for (const auto& part : own_command()) command.push_back(part);
  EXPECT_EQ(exit_code(start(command, {"EMEND_COLLECTIVES_SCENARIO=work"})), 0);
}

}  // namespace device_collectives_test
}  // namespace emend::devices
