// Tests of groups of processes: the test starts itself again, once a rank, and the child does what a variable says.
#pragma once

#include <ATen/ATen.h>
#include <emend/devices/collectives.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/processes.h"

namespace emend::testing {

/// This program, and the arguments with which it runs TEST(Child, Run) alone.
inline std::string own_program() {
  return std::filesystem::read_symlink("/proc/self/exe").string();
}
inline const std::vector<std::string> kChildAlone = {"--gtest_filter=Child.Run", "--gtest_brief=1"};

/// Exit statuses of `count` children of one group; a test that failed in one of them fails here with its output.
inline std::vector<int> run_children(int count, const ProcessesOptions& options) {
  std::vector<int> codes;
  for (const auto& result : run_processes(Launcher::kVariables, count, own_program(), kChildAlone, options)) {
    codes.push_back(result.status);
    if (result.status == 1) ADD_FAILURE() << result.out << result.err;
  }
  return codes;
}

/// Sums of several dtypes on `device`, right by whatever way they go: eight calls, of which one has no numbers.
inline void expect_sums(devices::Collectives& group, c10::Device device) {
  const int n = group.size(), r = group.rank();
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kLong, at::kInt}) {
    auto t = at::full({3, 2}, r + 1, dtype).to(device);
    group.all_reduce_sum(t);
    EXPECT_EQ(t.device(), device);
    EXPECT_TRUE(at::equal(t.cpu(), at::full({3, 2}, n * (n + 1) / 2, dtype))) << t.cpu();
  }
  // Summed in float64 and rounded once: in float32, 1e8 + 4 is 1e8.
  auto big = at::full({1}, r == 0 ? 1e8 : 4.0, at::kFloat).to(device);
  group.all_reduce_sum(big);
  EXPECT_EQ(big.item<float>(), static_cast<float>(1e8 + 4.0 * (n - 1)));
  auto base = at::zeros({4, 4}, at::kDouble).to(device);  // in place through a view
  auto column = base.select(1, 2);
  column.fill_(1);
  group.all_reduce_sum(column);
  EXPECT_EQ(base.sum().item<double>(), 4.0 * n);
  auto none = at::empty({0}, at::kDouble).to(device);
  group.all_reduce_sum(none);
}

}  // namespace emend::testing
