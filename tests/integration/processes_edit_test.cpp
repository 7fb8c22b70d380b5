// `memit_edit` as one process, and as two and three that a launcher started: the same edit, the same figures. Started
// with the variables that torchrun sets (everywhere), and under mpirun (where it is installed).
#include <emend/core/safetensors.h>

#include <iostream>
#include <map>

#include "support/processes.h"
#include "support/program_fixture.h"

namespace emend::testing {
namespace processes_edit_test {

using nlohmann::json;

// What depends on who did the work or how long it took.
bool of_the_run_alone(const std::string& key) {
  for (const char* name : {"seconds", "peak_bytes", "transfers", "statistics", "cache", "command"})
    if (key == name) return true;
  return false;
}

// Numbers up to rounding, everything else exactly.
void expect_same(const json& expected, const json& got, const std::string& where, double tolerance) {
  if (expected.is_number_float() && got.is_number()) {
    EXPECT_NEAR(got.get<double>(), expected.get<double>(), tolerance * (1 + std::abs(expected.get<double>()))) << where;
  } else if (expected.is_object() && got.is_object()) {
    EXPECT_EQ(got.size(), expected.size()) << where;
    for (const auto& [key, value] : expected.items()) {
      if (of_the_run_alone(key)) continue;
      ASSERT_TRUE(got.contains(key)) << where << "." << key;
      expect_same(value, got[key], where + "." + key, tolerance);
    }
  } else if (expected.is_array() && got.is_array()) {
    ASSERT_EQ(got.size(), expected.size()) << where;
    for (size_t i = 0; i < got.size(); ++i)
      expect_same(expected[i], got[i], where + "[" + std::to_string(i) + "]", tolerance);
  } else {
    EXPECT_EQ(got, expected) << where;
  }
}

class ProcessesEdit : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    const std::vector<std::pair<std::string, std::string>> subjects = {
        {"The Eiffel Tower", "Rome"}, {"The Colosseum", "Oslo"}, {"Big Ben", "Lima"},
        {"The Alhambra", "Kyoto"},    {"Petra", "Dublin"},       {"The great wall of China", "Bern"},
        {"Machu Picchu", "Accra"}};
    std::string lines;
    for (const auto& [subject, target] : subjects)
      lines += json{{"prompt", "{} is in the city of"},
                    {"subject", subject},
                    {"target_new", target},
                    {"target_true", "Paris"},
                    {"paraphrase_prompts", {"One finds " + subject + " in"}},
                    {"neighborhood_prompts", {"The Louvre is in the city of"}}}
                   .dump() +
               "\n";
    write_file(folder_ / "facts.jsonl", lines);
    write_file(folder_ / "ft.yaml",
               "alg_name: FT\nlayers: [1, 2]\nnum_steps: 5\nlr: 0.001\nbatch_size: 1\n"
               "objective_optimization: target_new\n");
  }
  /// As ProgramTest::edit, with run folder and cache `out`; one thread each: mpirun binds processes to cores, and
  /// products of more threads add in another order.
  [[nodiscard]] std::vector<std::string> edit_in(const std::string& out, std::vector<std::string> more) const {
    more.insert(more.end(), {"--out", path(out), "--cache", path(out + "-cache"), "--threads", "1"});
    return edit(more);
  }
  void edit_alone(const std::string& out, const std::vector<std::string>& more) {
    const auto result = run_program("memit_edit", edit_in(out, more));
    ASSERT_EQ(result.status, 0) << result.err;
  }
  /// Runs it, and checks that the first process alone spoke.
  void edit_together(Launcher launcher, int count, const std::string& out, std::vector<std::string> more) {
    more.emplace_back("--json");
    const auto results = run_processes(launcher, count, "memit_edit", edit_in(out, more));
    for (size_t r = 0; r < results.size(); ++r) {
      ASSERT_EQ(results[r].status, 0) << results[r].err;
      if (r == 0) {
        EXPECT_EQ(json::parse(results[r].out)["schema"], 1) << "one document on standard output";
        EXPECT_NE(results[r].err.find(std::to_string(count) + " processes share the work"), std::string::npos);
      } else {
        EXPECT_EQ(results[r].out + results[r].err, "") << "the others are silent";
      }
    }
  }
  /// Largest difference of the packs' tensors, relative to the largest number of each.
  [[nodiscard]] double pack_difference(const std::string& one, const std::string& other) const {
    const SafetensorsFile a(folder_ / one / "edit.safetensors"), b(folder_ / other / "edit.safetensors");
    double most = 0;
    EXPECT_EQ(a.tensors().size(), b.tensors().size());
    for (const auto& [name, info] : a.tensors()) {
      const at::Tensor x = a.tensor(name).to(at::kDouble), y = b.tensor(name).to(at::kDouble);
      most = std::max(most, ((x - y).abs().max() / x.abs().max()).item<double>());
    }
    return most;
  }
  void expect_same_documents(const std::string& one, const std::string& other, double tolerance) const {
    expect_same(results(one), results(other), "results", tolerance);
    expect_same(cases(one), cases(other), "cases", tolerance);
  }
  void compare(const std::string& what, const std::string& one, const std::string& other, double weights) const {
    const double most = pack_difference(one, other);
    std::cout << what << ": weights differ by " << most << "\n";
    EXPECT_LE(most, weights) << what;
    expect_same_documents(one, other, 1e-5);
  }
};

class ProcessesEditBy : public ProcessesEdit, public ::testing::WithParamInterface<Launcher> {
 protected:
  void SetUp() override {
    if (GetParam() == Launcher::kMpirun && path_of("mpirun").empty())
      GTEST_SKIP() << "needs mpirun (Debian: openmpi-bin)";
    ProcessesEdit::SetUp();
  }
};
INSTANTIATE_TEST_SUITE_P(Launchers, ProcessesEditBy, ::testing::Values(Launcher::kVariables, Launcher::kMpirun),
                         [](const auto& info) { return to_string(info.param); });

TEST_P(ProcessesEditBy, TwoAndThreeEditLikeOne) {
  // One fact at a time, the arithmetic does not depend on who does it: the same bits.
  edit_alone("alone", {"--eval", "auto,generation", "--engine", "reference"});
  // The fast engine works on facts together: who does what moves the last digits.
  const std::vector<std::string> fast = {"--compute-dtype", "float32"};
  edit_alone("fast", fast);
  // How many there are does not depend on who started them.
  for (const int count : GetParam() == Launcher::kMpirun ? std::vector{3} : std::vector{2, 3}) {
    const std::string out = "run" + std::to_string(count);
    edit_together(GetParam(), count, out, {"--eval", "auto,generation", "--engine", "reference"});
    compare(std::to_string(count) + " processes, reference engine", "alone", out, 0);
    edit_together(GetParam(), count, out + "-fast", fast);
    compare(std::to_string(count) + " processes, fast engine", "fast", out + "-fast", 1e-5);
  }
}

TEST_P(ProcessesEditBy, EachHoldsASplitModelAndEditsInBatches) {
  const std::vector<std::string> batches = {"--batch-size", "3", "--eval-at", "each", "--engine", "reference"};
  edit_alone("alone", batches);
  std::vector<std::string> split = batches;
  split.insert(split.end(), {"--device-map", "sim:2"});
  edit_together(GetParam(), 2, "split", split);
  EXPECT_EQ(pack_difference("alone", "split"), 0);
  for (const char* key : {"retention", "metrics", "edits"})
    expect_same(results("alone")[key], results("split")[key], key, 1e-5);
}

TEST_F(ProcessesEdit, EditorsThatAreNotSharedDoTheSameInEveryProcess) {
  edit_alone("rome", {"--editor", "rome", "--hparams", path("rome.yaml")});
  edit_together(Launcher::kVariables, 2, "rome2", {"--editor", "rome", "--hparams", path("rome.yaml")});
  compare("rome", "rome", "rome2", 0);
  edit_alone("ft", {"--editor", "ft", "--hparams", path("ft.yaml")});
  edit_together(Launcher::kVariables, 2, "ft2", {"--editor", "ft", "--hparams", path("ft.yaml")});
  compare("ft", "ft", "ft2", 0);
}

TEST_F(ProcessesEdit, EvalIsSharedToo) {
  edit_alone("run", {"--eval", "none"});
  const std::vector<std::string> arguments = {
      "eval",  "--model", path("model"), "--facts", path("facts.jsonl"), "--pack", path("run/edit.safetensors"),
      "--json"};
  const auto in = [&](const std::string& cache) {
    auto all = arguments;
    all.insert(all.end(), {"--cache", path(cache)});
    return all;
  };
  const auto alone = run_program("emend", in("eval-one"));
  ASSERT_EQ(alone.status, 0) << alone.err;
  for (const std::string turn : {"evaluated", "from the cache"}) {
    const auto results = run_processes(Launcher::kVariables, 3, "emend", in("eval-three"));
    for (const auto& result : results) EXPECT_EQ(result.status, 0) << turn << result.err;
    expect_same(json::parse(alone.out), json::parse(results[0].out), turn, 1e-5);
    EXPECT_EQ(results[1].out + results[2].out, "");
  }
}

TEST_F(ProcessesEdit, AnInterruptedRunGoesOn) {
  const std::vector<std::string> batches = {"--batch-size", "1", "--eval-at", "each", "--engine", "reference"};
  edit_alone("alone", batches);
  ProcessesOptions interrupt;
  interrupt.program.signal_when = "edited facts 3-3";  // only the first process says so, and only it gets the signal
  const auto begin = std::chrono::steady_clock::now();
  const auto stopped = run_processes(Launcher::kVariables, 2, "memit_edit", edit_in("run", batches), interrupt);
  EXPECT_EQ(stopped[0].status, 130) << stopped[0].err;
  // Lost the first one, or heard of its interruption.
  EXPECT_TRUE(stopped[1].status == 5 || stopped[1].status == 130) << stopped[1].status << stopped[1].err;
  EXPECT_NE(stopped[1].err.find("process 1 of 2"), std::string::npos) << stopped[1].err;
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 60);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / "results.json"));
  std::vector<std::string> again = batches;
  again.emplace_back("--resume");
  edit_together(Launcher::kVariables, 2, "run", again);
  EXPECT_EQ(pack_difference("alone", "run"), 0);
  expect_same(results("alone")["retention"], results("run")["retention"], "retention", 1e-5);
  no_temporaries();
}

TEST_F(ProcessesEdit, AProcessThatFailsEndsTheOthers) {
  ProcessesOptions options;
  auto wrong = edit_in("run", {});
  for (auto& argument : wrong)
    if (argument == path("facts.jsonl")) argument = "/nowhere.jsonl";
  options.arguments_of_rank[1] = wrong;
  const auto begin = std::chrono::steady_clock::now();
  const auto results = run_processes(Launcher::kVariables, 3, "memit_edit", edit_in("run", {}), options);
  EXPECT_NE(results[1].err.find("/nowhere.jsonl"), std::string::npos) << results[1].err;
  for (const int rank : {0, 2}) {
    EXPECT_EQ(results[static_cast<size_t>(rank)].status, 5) << results[static_cast<size_t>(rank)].err;
    EXPECT_NE(results[static_cast<size_t>(rank)].err.find("another process has ended"), std::string::npos)
        << results[static_cast<size_t>(rank)].err;
  }
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 60);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / "edit.safetensors"));
}

TEST_F(ProcessesEdit, AProcessThatDiesEndsTheOthersWithinSeconds) {
  ProcessesOptions options;
  options.killed_rank = 1;
  options.kill_when = "edited facts 1-1";
  const auto arguments = edit_in("run", {"--batch-size", "1", "--engine", "reference"});
  const auto begin = std::chrono::steady_clock::now();
  const auto results = run_processes(Launcher::kVariables, 3, "memit_edit", arguments, options);
  EXPECT_EQ(results[1].status, 128 + SIGKILL);
  for (const size_t rank : {0, 2}) {
    EXPECT_EQ(results[rank].status, 5) << results[rank].err;
    EXPECT_NE(results[rank].err.find("another process has ended"), std::string::npos) << results[rank].err;
  }
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 60);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / "results.json"));
}

TEST_F(ProcessesEdit, AFolderThatIsTakenIsAnErrorOfAll) {
  edit_alone("run", {"--eval", "none"});
  const auto results = run_processes(Launcher::kVariables, 2, "memit_edit", edit_in("run", {}));
  for (const auto& result : results) {
    expect_ended(result, 2, {"holds the results of an earlier run"});
  }
}

TEST_F(ProcessesEdit, DifferentOptionsAreRefusedBeforeAnythingIsDone) {
  write_file(folder_ / "other.txt", corpus() + "More.\n\n");
  for (const std::vector<std::string>& different : {std::vector<std::string>{"--corpus", path("other.txt")},
                                                    {"--solve-dtype", "float32"},
                                                    {"--stats-dtype", "float32"},
                                                    {"--contexts", path("contexts.json")},
                                                    {"--set", "v_lr=0.3"}}) {
    write_file(folder_ / "contexts.json", "[[\"{}\"], [\"And so. {}\"]]");
    ProcessesOptions options;
    options.arguments_of_rank[1] = edit_in("different", different);
    const auto results = run_processes(Launcher::kVariables, 2, "memit_edit", edit_in("different", {}), options);
    for (const auto& result : results) {
      EXPECT_EQ(result.status, 2) << different[0] << ": " << result.err;
      EXPECT_NE(result.err.find("the same in all processes"), std::string::npos) << result.err;
      EXPECT_EQ(result.err.find("internal error"), std::string::npos) << result.err;
    }
  }
}

}  // namespace processes_edit_test
}  // namespace emend::testing
