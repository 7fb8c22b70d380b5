// `emend stats` as one process, and as two and three under mpirun: the same statistics.
#include <emend/core/safetensors.h>

#include <iostream>
#include <map>

#include "support/program_fixture.h"

namespace emend::testing {
namespace {

class MpirunStatistics : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    std::string text;  // several batches for each process
    for (int i = 0; i < 700; ++i)
      text += "Paragraph " + std::to_string(i * 37) + " speaks of " + std::string(1 + i % 23, 'x') + " things.\n\n";
    write_file(folder_ / "corpus.txt", text);
  }
  [[nodiscard]] ProgramResult stats(int processes, const std::string& more = "") const {
    std::string command = "exec ";
    if (processes > 1) command += "mpirun --oversubscribe --allow-run-as-root -n " + std::to_string(processes) + " ";
    command += "'" + program_path("emend").string() + "' stats --model '" + path("model") + "' --corpus '" +
               path("corpus.txt") + "' --layers 0,2,3 --stats-tokens 20000 --cache '" +
               path("cache" + std::to_string(processes)) + "' " + more;
    return run_program("/bin/sh", {"-c", command});
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

TEST_F(MpirunStatistics, TwoAndThreeProcessesGiveTheNumbersOfOne) {
  if (run_program("/bin/sh", {"-c", "command -v mpirun"}).status != 0)
    GTEST_SKIP() << "needs mpirun (Debian: openmpi-bin)";
  const auto alone = stats(1);
  ASSERT_EQ(alone.status, 0) << alone.err;
  const auto expected = tensors(1);
  EXPECT_GE(expected.size(), 3U);
  for (const int processes : {2, 3})
    for (const std::string map : {"cpu", "sim:2"}) {
      std::filesystem::remove_all(folder_ / ("cache" + std::to_string(processes)));
      const auto result = stats(processes, "--device-map " + map);
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
      const auto again = stats(processes, "--device-map " + map);
      ASSERT_EQ(again.status, 0) << again.err;
      EXPECT_EQ(nlohmann::json::parse(again.out)["layers_from_cache"].size(), 3U);
    }
}

TEST_F(MpirunStatistics, AProcessThatFailsEndsTheOthers) {
  if (run_program("/bin/sh", {"-c", "command -v mpirun"}).status != 0)
    GTEST_SKIP() << "needs mpirun (Debian: openmpi-bin)";
  // The second process finds no corpus.
  const auto begin = std::chrono::steady_clock::now();
  const auto result = run_program(
      "/bin/sh", {"-c", "exec mpirun --oversubscribe --allow-run-as-root -n 2 /bin/sh -c 'c=" + path("corpus.txt") +
                            "; [ \"$OMPI_COMM_WORLD_RANK\" = 1 ] && c=/nowhere; exec " +
                            program_path("emend").string() + " stats --model " + path("model") +
                            " --corpus $c --layers 0 --stats-tokens 20000 --cache " + path("failed") + "'"});
  EXPECT_NE(result.status, 0);
  EXPECT_NE(result.err.find("/nowhere"), std::string::npos) << result.err;
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 60);
}

}  // namespace
}  // namespace emend::testing
