#include <emend/devices/process_environment.h>
#include <gtest/gtest.h>

#include <map>

#include "support/error_of.h"

namespace emend::devices {
namespace device_process_environment_test {

using Variables = std::map<std::string, std::string>;

ProcessEnvironment read(const Variables& variables) {
  return read_process_environment([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

void expect_refused(const Variables& variables, const std::string& word) {
  testing::expect_error(ErrorClass::kInvalidArgument, {word}, [&] { (void)read(variables); });
}

TEST(ProcessEnvironment, NothingMeansAlone) {
  const auto alone = read({});
  EXPECT_EQ(alone.rank, 0);
  EXPECT_EQ(alone.size, 1);
}

TEST(ProcessEnvironment, ReadsTorchrun) {
  const auto e = read({{"RANK", "5"},
                       {"WORLD_SIZE", "8"},
                       {"LOCAL_RANK", "1"},
                       {"LOCAL_WORLD_SIZE", "4"},
                       {"MASTER_ADDR", "node1"},
                       {"MASTER_PORT", "1234"},
                       {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                       {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_EQ(e.rank, 5);
  EXPECT_EQ(e.size, 8);
  EXPECT_EQ(e.local_rank, 1);
  EXPECT_EQ(e.local_size, 4);
  EXPECT_EQ(e.master_address, "node1");
  EXPECT_EQ(e.master_port, 1234);
  EXPECT_TRUE(e.agent_store);
  EXPECT_EQ(e.attempt, "2");
  EXPECT_EQ(e.source, "torchrun");
}

TEST(ProcessEnvironment, ReadsOpenMpi) {
  const Variables variables{{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "job7"}};
  const auto e = read(variables);
  EXPECT_EQ(e.rank, 1);
  EXPECT_EQ(e.size, 2);
  EXPECT_EQ(e.source, "Open MPI");
  EXPECT_EQ(e.master_address, "127.0.0.1");
  EXPECT_EQ(e.master_port, read(variables).master_port);
  auto other = variables;
  other["PMIX_NAMESPACE"] = "job8";
  EXPECT_NE(read(other).master_port, e.master_port) << "two jobs on one machine do not meet";
  other["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";
  expect_refused(other, "MASTER_ADDR");
}

TEST(ProcessEnvironment, ReadsSlurmStepsButNotBatchScripts) {
  const Variables step{{"SLURM_PROCID", "3"},
                       {"SLURM_STEP_NUM_TASKS", "4"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_STEP_NUM_NODES", "2"},
                       {"SLURM_STEP_NODELIST", "gpu[03-07,9],other"},
                       {"SLURM_JOB_ID", "99"}};
  const auto e = read(step);
  EXPECT_EQ(e.rank, 3);
  EXPECT_EQ(e.size, 4);
  EXPECT_EQ(e.local_size, 2);
  EXPECT_EQ(e.master_address, "gpu03");
  for (const auto& [list, first] : Variables{{"a", "a"}, {"a,b", "a"}, {"n[1,2]", "n1"}, {"n[12]", "n12"}}) {
    auto other = step;
    other["SLURM_STEP_NODELIST"] = list;
    EXPECT_EQ(read(other).master_address, first);
  }
  EXPECT_EQ(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}).size, 1);
}

// MPICH and Intel MPI start their proxies through srun, one a machine: what srun says is about those.
TEST(ProcessEnvironment, ReadsMpiexecInsideOfAnAllocation) {
  Variables variables{{"SLURM_PROCID", "0"},  {"SLURM_STEP_NUM_TASKS", "1"},
                      {"SLURM_LOCALID", "0"}, {"SLURM_JOB_ID", "99"},
                      {"PMI_RANK", "3"},      {"PMI_SIZE", "4"}};
  const auto e = read(variables);
  EXPECT_EQ(e.source, "PMI");
  EXPECT_EQ(e.rank, 3);
  EXPECT_EQ(e.size, 4);
  // srun itself sets both for its tasks.
  variables["SLURM_STEP_NUM_TASKS"] = "4";
  variables["SLURM_PROCID"] = "3";
  EXPECT_EQ(read(variables).source, "Slurm");
  EXPECT_EQ(read(variables).rank, 3);
}

TEST(ProcessEnvironment, ReadsPmi) {
  const auto e = read({{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}});
  EXPECT_EQ(e.rank, 1);
  EXPECT_EQ(e.size, 3);
}

TEST(ProcessEnvironment, BadValuesNameTheVariable) {
  expect_refused({{"RANK", "0"}}, "WORLD_SIZE");
  expect_refused({{"WORLD_SIZE", "2"}}, "RANK");
  expect_refused({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK");
  expect_refused({{"RANK", "x"}, {"WORLD_SIZE", "2"}}, "\"x\"");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "99999"}}, "MASTER_PORT");
}

}  // namespace device_process_environment_test
}  // namespace emend::devices
