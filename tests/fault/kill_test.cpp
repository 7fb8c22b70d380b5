// A run that is killed at any moment, again and again, ends with the bytes of a run that nobody disturbed, and at no
// moment is there an unreadable file under a final name.
//
// EMEND_KILLS sets how often runs are killed (default: as often as kSeconds allow, at most 50).
#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/editors/packs/pack.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>

#include "support/program_fixture.h"

namespace emend::testing {
namespace kill_test {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kKills = 50;
constexpr double kSeconds = 30;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void require_json(const std::string& text) {
  if (!json::accept(text)) throw std::runtime_error("no JSON: " + text.substr(0, 80));
}

// Throws if a file cannot be read as what its name says.
void require_readable(const fs::path& path) {
  const std::string name = path.filename().string();
  if (name.ends_with(".jsonl")) {
    const std::string text = read_file(path);
    // A log grows line by line; what follows the last line end is the line that was being written.
    for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
      require_json(text.substr(begin, end - begin));
    if (name != "run.jsonl" && !text.empty() && text.back() != '\n') throw std::runtime_error("cut off");
  } else if (name == "edit.safetensors") {
    (void)editors::load_pack(path);
  } else if (name.ends_with(".safetensors")) {
    const SafetensorsFile file(path);
    if (path.string().find("cache") != std::string::npos) require_intact(file);
  } else if (name.ends_with(".json")) {
    require_json(read_file(path));
  } else if (name.ends_with(".html")) {
    if (read_file(path).find("</html>") == std::string::npos) throw std::runtime_error("cut off");
  }
}

class KillTest : public ProgramTest {
 protected:
  void SetUp() override {
    ::setenv("OMP_NUM_THREADS", "1", 1);
    // A killed process loses nothing that it has written, so the tests need no disk.
    if (fs::is_directory("/dev/shm")) ::setenv("TEST_TMPDIR", "/dev/shm", 1);
    ProgramTest::SetUp();
  }

  // Statistics, two batches of targets and insertion, evaluation, and all ways of saving.
  [[nodiscard]] std::vector<std::string> arguments(const std::string& name, bool resume = false) const {
    auto list = edit({"--batch-size", "1", "--eval", "counterfact", "--save", "pack,model,peft", "--show", "0", "--out",
                      path(name), "--cache", path(name + "-cache"), "--stats-tokens", "2000"});
    if (resume) list.push_back("--resume");
    return list;
  }

  [[nodiscard]] std::map<std::string, std::string> results(const std::string& name) const {
    std::map<std::string, std::string> bytes;
    for (const char* file : {"edit.safetensors", "model/model.safetensors", "model/config.json",
                             "adapter/adapter_model.safetensors", "adapter/adapter_config.json"})
      bytes[file] = read_file(folder_ / name / file);
    for (auto& document : cases(name)) {
      document.erase("seconds");
      bytes["cases"] += document.dump() + "\n";
    }
    return bytes;
  }

  // How far the run had come when it was killed.
  [[nodiscard]] std::string phase(const std::string& name) const {
    const fs::path run = folder_ / name;
    if (fs::exists(run / "results.json")) return "6 results";
    if (fs::exists(run / "adapter") || fs::exists(run / "model")) return "5 model and adapter";
    if (fs::exists(run / "edit.safetensors")) return "4 pack";
    if (fs::exists(run / "checkpoint" / "batch-000000.safetensors")) return "3 insertion";
    if (fs::exists(folder_ / (name + "-cache") / "statistics") &&
        !fs::is_empty(folder_ / (name + "-cache") / "statistics"))
      return "2 targets";
    if (fs::exists(run / "checkpoint" / "settings.json")) return "1 evaluation, statistics";
    return "0 loading";
  }

  void expect_readable(const std::string& name) const {
    for (const auto& folder : {folder_ / name, folder_ / (name + "-cache")}) {
      if (!fs::exists(folder)) continue;
      for (const auto& entry : fs::recursive_directory_iterator(folder)) {
        if (!entry.is_regular_file() || entry.path().string().find(".tmp-") != std::string::npos) continue;
        try {
          require_readable(entry.path());
        } catch (const std::exception& error) {
          ADD_FAILURE() << entry.path() << " after a kill in phase " << phase(name) << ": " << error.what();
        }
      }
    }
  }
};

TEST_F(KillTest, EveryResumedRunEndsAsTheUndisturbedOne) {
  const auto begin = std::chrono::steady_clock::now();
  const auto whole = must_run("memit_edit", arguments("whole"));
  double duration = seconds_since(begin);  // a guess that follows the machine's load
  const auto expected = results("whole");

  const char* asked = std::getenv("EMEND_KILLS");
  const int wanted = asked ? std::atoi(asked) : kKills;
  std::mt19937 random(20261121);
  std::map<std::string, int> phases;
  int kills = 0, runs = 0;
  for (; kills < wanted && (asked || seconds_since(begin) < kSeconds) && !HasFailure(); ++runs) {
    fs::remove_all(folder_ / "run");
    fs::remove_all(folder_ / "run-cache");
    bool resume = false, complete = false;
    // A resumed run may be killed in its turn: three kills a run on average.
    while (kills < wanted && !complete && (!resume || random() % 4 != 0)) {
      ProgramOptions options;
      options.signal = SIGKILL;
      options.signal_after = std::max(1e-3, duration * static_cast<double>(random() % 1000) / 1000);
      const auto started = std::chrono::steady_clock::now();
      const auto result = run_program("memit_edit", arguments("run", resume), options);
      const fs::path run = folder_ / "run";
      // The kill may also come after the last step.
      complete = result.status == 0 || (fs::exists(run / "results.json") && !fs::exists(run / "checkpoint"));
      resume = true;
      if (complete) {
        duration = std::max(0.1, (2 * duration + seconds_since(started)) / 3);
        break;
      }
      ASSERT_EQ(result.status, 128 + SIGKILL) << result.err;
      ++kills;
      ++phases[phase("run")];
      expect_readable("run");
    }
    if (!complete) {
      must_run("memit_edit", arguments("run", true));
    }
    for (const auto& [file, bytes] : results("run"))
      EXPECT_EQ(bytes == expected.at(file), true) << file << " differs after resuming";
    for (const auto& entry : fs::recursive_directory_iterator(folder_ / "run"))
      EXPECT_EQ(entry.path().filename().string().find(".tmp-"), std::string::npos) << entry.path() << " was left";
    EXPECT_FALSE(fs::exists(folder_ / "run" / "checkpoint"));
  }
  std::cout << "[ figure   ] " << kills << " kills in " << runs << " runs of about " << duration << " s;";
  for (const auto& [phase, n] : phases) std::cout << "  " << phase.substr(2) << ": " << n;
  std::cout << '\n';
  EXPECT_GE(kills, asked ? wanted : 5);
}

// A ledger whose process dies while it changes the weights finishes the change, or undoes it, when it is opened again.
TEST_F(KillTest, ALedgerSurvivesToo) {
  must_run("memit_edit", edit({"--eval", "none", "--save", "pack", "--quiet"}));
  const std::string original = model_bytes(), pack = path("run/edit.safetensors");
  must_run("emend", {"apply", pack, "--model", path("model"), "--out", path("edited")});
  const std::string edited = model_bytes("edited");
  const auto begin = std::chrono::steady_clock::now();
  must_run("emend", {"apply", pack, "--model", path("model")});
  const double duration = seconds_since(begin);
  std::mt19937 random(7);
  bool in_force = true;
  for (int i = 0; i < 12; ++i) {
    ProgramOptions options;
    options.signal = SIGKILL;
    options.signal_after = std::max(1e-3, duration * static_cast<double>(random() % 1000) / 1000);
    const std::vector<std::string> command = in_force
                                                 ? std::vector<std::string>{"revert", "--all", "--model", path("model")}
                                                 : std::vector<std::string>{"apply", pack, "--model", path("model")};
    (void)run_program("emend", command, options);
    (void)SafetensorsFile(folder_ / "model" / "model.safetensors");
    const auto listed = must_run("emend", {"list", "--model", path("model"), "--json"});
    const auto edits = json::parse(listed.out)["edits"];
    in_force = !edits.empty() && edits[0]["active"].get<bool>();
    EXPECT_EQ(model_bytes() == (in_force ? edited : original), true) << "step " << i;
  }
  if (in_force) {
    must_run("emend", {"revert", "--all", "--model", path("model")});
  }
  EXPECT_EQ(model_bytes() == original, true);
}

}  // namespace kill_test
}  // namespace emend::testing
