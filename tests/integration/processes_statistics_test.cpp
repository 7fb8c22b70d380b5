// `emend stats` as one process, and as two and three that a launcher started: the same statistics.
#include <emend/core/safetensors.h>

#include <iostream>
#include <map>

#include "support/processes.h"
#include "support/program_fixture.h"

namespace emend::testing {
namespace processes_statistics_test {

class ProcessesStatistics : public ProgramTest, public ::testing::WithParamInterface<Launcher> {
 protected:
  void SetUp() override {
    if (GetParam() == Launcher::kMpirun && path_of("mpirun").empty())
      GTEST_SKIP() << "needs mpirun (Debian: openmpi-bin)";
    ProgramTest::SetUp();
    std::string text;  // several batches for each process
    for (int i = 0; i < 700; ++i)
      text += "Paragraph " + std::to_string(i * 37) + " speaks of " + std::string(1 + i % 23, 'x') + " things.\n\n";
    write_file(folder_ / "corpus.txt", text);
  }
  [[nodiscard]] std::vector<std::string> arguments(const std::string& cache, const std::string& map) const {
    // One thread each: mpirun binds processes to cores, and products of more threads add in another order.
    return {"stats",    "--model",          path("model"),
            "--corpus", path("corpus.txt"), "--layers",
            "0,2,3",    "--stats-tokens",   "20000",
            "--cache",  path(cache),        "--device-map",
            map,        "--threads",        "1"};
  }
  [[nodiscard]] ProgramResult stats(int processes, const std::string& map) const {
    const auto all = arguments("cache" + std::to_string(processes), map);
    if (processes == 1) return run_program("emend", all);
    auto results = run_processes(GetParam(), processes, "emend", all);
    for (size_t r = 1; r < results.size(); ++r) EXPECT_EQ(results[r].status, 0) << results[r].err;
    return results[0];
  }
  [[nodiscard]] std::map<std::string, at::Tensor> tensors(int processes) const {
    std::map<std::string, at::Tensor> found;
    const auto folder = folder_ / ("cache" + std::to_string(processes));
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
      if (entry.path().extension() == ".safetensors") {
        const SafetensorsFile file(entry.path());
        for (const auto& [name, info] : file.tensors())
          found[entry.path().filename().string() + " " + name] = file.tensor(name).clone();
      }
    return found;
  }
};

INSTANTIATE_TEST_SUITE_P(Launchers, ProcessesStatistics, ::testing::Values(Launcher::kVariables, Launcher::kMpirun),
                         [](const auto& info) { return to_string(info.param); });

TEST_P(ProcessesStatistics, TwoAndThreeGiveTheNumbersOfOne) {
  const auto alone = stats(1, "cpu");
  ASSERT_EQ(alone.status, 0) << alone.err;
  const auto expected = tensors(1);
  EXPECT_GE(expected.size(), 3U);
  for (const int processes : {2, 3})
    for (const std::string map : {"cpu", "sim:2"}) {
      std::filesystem::remove_all(folder_ / ("cache" + std::to_string(processes)));
      const auto result = stats(processes, map);
      ASSERT_EQ(result.status, 0) << result.err;
      const auto document = nlohmann::json::parse(result.out);  // one document: only the first process speaks
      EXPECT_EQ(document["processes"], processes);
      EXPECT_EQ(document["tokens"], nlohmann::json::parse(alone.out)["tokens"]);
      const auto got = tensors(processes);
      ASSERT_EQ(got.size(), expected.size()) << "the cache has the same files, so that a run finds them";
      double most = 0;
      for (const auto& [name, tensor] : expected) {
        ASSERT_TRUE(got.contains(name)) << name;
        most = std::max(most, (got.at(name).to(at::kDouble) - tensor.to(at::kDouble)).norm().item<double>() /
                                  tensor.to(at::kDouble).norm().item<double>());
      }
      std::cout << processes << " processes, " << map << ": statistics differ by " << most << " of their norm\n";
      EXPECT_LT(most, 1e-12);
      // Read again from the cache.
      const auto again = stats(processes, map);
      ASSERT_EQ(again.status, 0) << again.err;
      EXPECT_EQ(nlohmann::json::parse(again.out)["layers_from_cache"].size(), 3U);
    }
}

TEST_P(ProcessesStatistics, AProcessThatFailsEndsTheOthers) {
  if (GetParam() == Launcher::kMpirun) GTEST_SKIP() << "one process's arguments are changed, which mpirun cannot";
  ProcessesOptions options;  // the second process finds no model
  options.arguments_of_rank[1] = {"stats", "--model", "/nowhere", "--corpus", path("corpus.txt"), "--layers", "0"};
  const auto begin = std::chrono::steady_clock::now();
  const auto results = run_processes(GetParam(), 2, "emend", arguments("failed", "cpu"), options);
  EXPECT_EQ(results[0].status, 5) << results[0].err;
  EXPECT_NE(results[1].err.find("/nowhere"), std::string::npos) << results[1].err;
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 60);
}

}  // namespace processes_statistics_test
}  // namespace emend::testing
