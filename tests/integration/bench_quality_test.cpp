// `emend bench --quality`: several editors on the same facts, stopped and taken up again, with bad input.
#include <emend/core/atomic_file.h>
#include <emend/evaluation/report.h>
#include <gtest/gtest.h>

#include <map>

#include "support/program_fixture.h"

namespace emend::testing {
namespace bench_quality_test {

namespace fs = std::filesystem;
using nlohmann::json;

class BenchQualityTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    write_cities("cities.jsonl");
  }
  [[nodiscard]] std::vector<std::string> words(const std::string& editors, std::vector<std::string> more = {}) const {
    std::vector<std::string> all = {
        "bench",     "--quality",          "--model",  path("model"),      "--facts",        path("cities.jsonl"),
        "--hparams", path("hparams.yaml"), "--corpus", path("corpus.txt"), "--stats-tokens", "2000",
        "--cache",   path("cache"),        "--eval",   "counterfact,free", "--editors",      editors,
        "--quiet"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  [[nodiscard]] ProgramResult bench(const std::string& editors, const std::vector<std::string>& more,
                                    const ProgramOptions& options = {}) const {
    return run_program("emend", words(editors, more), options);
  }
  [[nodiscard]] json document(const std::string& out) const {
    return json::parse(read_file(folder_ / out / "quality.json"));
  }
  static const json& row(const json& table, const std::string& name) {
    for (const auto& one : table["rows"])
      if (one["name"] == name) return one;
    throw std::out_of_range(name);
  }
  // Without what two equal comparisons differ in: time, memory, the folder's own name.
  [[nodiscard]] json steady(const std::string& out) const {
    json table = document(out);
    for (auto& one : table["rows"]) {
      one.erase("command");
      for (const char* part : {"figures", "last"})
        for (const char* key : {"seconds", "peak_bytes.host"}) one[part].erase(key);
      for (auto& entry : one["lifelong"]) entry.erase("seconds"), entry.erase("peak_bytes");
    }
    return table;
  }
  void expect_refused(const std::vector<std::string>& line, const std::vector<std::string>& parts) const {
    const auto result = run_program("emend", line);
    EXPECT_EQ(result.status, 2) << result.err;
    for (const auto& part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << part << " in " << result.err;
  }
};

TEST_F(BenchQualityTest, OneRunForEachAndOneTable) {
  const auto done = bench("memit,memit: clamp_norm_factor=0.4 v_lr=0.2", {"--seeds", "0,5", "--out", path("all")});
  ASSERT_EQ(done.status, 0) << done.err;
  const json table = document("all");
  EXPECT_EQ(table["rows"].size(), 2U + 6U);
  for (const char* name : {"memit, seed 0", "memit, seed 5", "memit: clamp_norm_factor=0.4, v_lr=0.2, seed 5"}) {
    const json& one = row(table, name);
    const fs::path run = folder_ / "all" / one["folder"].get<std::string>();
    const json results = json::parse(read_file(run / "results.json"));
    for (const auto& column : table["columns"]) {
      const std::string key = column["key"];
      const size_t dot = key.find('.');
      if (dot == std::string::npos) continue;
      EXPECT_EQ(one["figures"][key]["value"], results["metrics"][key.substr(0, dot)]["post"][key.substr(dot + 1)])
          << key;
    }
    EXPECT_EQ(one["figures"]["pack_bytes"]["value"], fs::file_size(run / "edit.safetensors"));
    EXPECT_GT(one["figures"]["seconds"]["value"], 0);
    EXPECT_NE(done.out.find("| " + std::string(name) + " | "), std::string::npos) << done.out;
    EXPECT_EQ(row(table, "unedited")["figures"]["counterfact.score"]["value"],
              results["metrics"]["counterfact"]["pre"]["score"]);
  }
  // Each is the run that its command line says, made by memit_edit.
  const json& one = row(table, "memit: clamp_norm_factor=0.4, v_lr=0.2, seed 5");
  auto command = one["command"].get<std::vector<std::string>>();
  ASSERT_EQ(command[0], "memit_edit");
  command.back() = path("alone");
  const auto alone = must_run("memit_edit", {command.begin() + 1, command.end()});
  EXPECT_TRUE(read_file(folder_ / "alone" / "edit.safetensors") ==
              read_file(folder_ / "all" / one["folder"].get<std::string>() / "edit.safetensors"));
  EXPECT_NE(read_file(folder_ / "all" / "quality.html").find("\"page\":\"quality\""), std::string::npos);

  // Drawn again from the files, with the figures as JSON.
  const std::string before = read_file(folder_ / "all" / "quality.json"),
                    page = read_file(folder_ / "all" / "quality.html");
  fs::remove(folder_ / "all" / "quality.json");
  fs::remove(folder_ / "all" / "quality.html");
  const auto again = must_run("emend", {"bench", "--quality", "--out", path("all"), "--json"});
  EXPECT_EQ(again.out, before);
  EXPECT_TRUE(read_file(folder_ / "all" / "quality.html") == page);
}

// Killed at one moment after the other, and taken up by the folder alone.
TEST_F(BenchQualityTest, SurvivesBeingKilled) {
  const std::string editors = "memit,emmet: v_lr=0.2";
  const std::vector<std::string> more = {"--protocol", "lifelong",    "--batch-size",  "2",
                                         "--eval-at",  "every=2",     "--health-data", path("health"),
                                         "--eval",     "free,health", "--log-file",    path("log.jsonl")};
  auto line = words(editors, more);
  std::erase(line, "--quiet");
  line.insert(line.end(), {"--out", path("whole")});
  must_run("emend", line);
  line.back() = path("cut");
  ProgramOptions options;
  options.signal = SIGKILL;
  int killed = 0;
  for (const char* moment : {"memit (1 of 2)", "edited facts 1-2", "after 4 edits", "edited facts 5-5",
                             "emmet: v_lr=0.2 (2 of 2)", "after 2 edits", "edited facts 3-4"}) {
    options.signal_when = moment;
    const bool begun = fs::exists(folder_ / "cut" / "variants.json");
    const auto cut = begun ? run_program("emend", {"bench", "--quality", "--out", path("cut"), "--resume"}, options)
                           : run_program("emend", line, options);
    if (cut.status == 0) break;
    ASSERT_EQ(cut.status, 128 + SIGKILL) << cut.err;
    ++killed;
  }
  if (killed == 0) GTEST_SKIP() << "every comparison ended before the signal reached it";
  // What is there can be looked at meanwhile.
  must_run("emend", {"bench", "--quality", "--out", path("cut")});
  const auto resumed = must_run("emend", {"bench", "--quality", "--out", path("cut"), "--resume"});
  EXPECT_EQ(steady("cut"), steady("whole"));
  for (const char* run : {"memit", "emmet-v_lr=0.2"}) {
    EXPECT_TRUE(read_file(folder_ / "cut" / run / "edit.safetensors") ==
                read_file(folder_ / "whole" / run / "edit.safetensors"))
        << run;
    EXPECT_EQ(row(document("cut"), std::string(run) == "memit" ? run : "emmet: v_lr=0.2")["lifelong"],
              results("cut/" + std::string(run))["lifelong"]);
  }
  EXPECT_NE(resumed.out.find("collapses at"), std::string::npos) << resumed.out;
}

TEST_F(BenchQualityTest, WhatCollapsesIsARow) {
  // The guard takes back what changes a weight by more than a third of itself.
  const std::vector<std::string> guard = {"--on-collapse", "revert", "--max-update", "0.3", "--out", path("out")};
  const auto done = bench("memit,memit: v_lr=1e-4", guard);
  ASSERT_EQ(done.status, 0) << done.err;
  const json table = document("out");
  EXPECT_EQ(row(table, "memit")["state"], "failed");
  EXPECT_NE(row(table, "memit")["note"].get<std::string>().find("size of the update"), std::string::npos) << table;
  EXPECT_EQ(row(table, "memit: v_lr=1e-4")["state"], "finished");
  EXPECT_NE(done.out.find("| memit | failed | "), std::string::npos) << done.out;
  // One more editor; what has failed is not tried again, what is finished not touched.
  const auto stamp = fs::last_write_time(folder_ / "out" / "memit-v_lr=1e-4" / "results.json");
  const auto failed = fs::last_write_time(folder_ / "out" / "memit" / "failure.json");
  must_run("emend", {"bench", "--quality", "--out", path("out"), "--resume", "--editors", "emmet: v_lr=1e-5"});
  EXPECT_EQ(document("out")["rows"].size(), table["rows"].size() + 1);
  EXPECT_EQ(row(document("out"), "emmet: v_lr=1e-5")["state"], "finished");
  EXPECT_EQ(fs::last_write_time(folder_ / "out" / "memit-v_lr=1e-4" / "results.json"), stamp);
  EXPECT_EQ(fs::last_write_time(folder_ / "out" / "memit" / "failure.json"), failed);
}

TEST_F(BenchQualityTest, BadInputIsRefusedBeforeAnythingRuns) {
  const auto with = [&](const std::string& editors) { return words(editors, {"--out", path("out")}); };
  expect_refused(with("memit,emmit"), {"emmit", "did you mean \"emmet\""});
  expect_refused(with("memit,latch,memit"), {"--editors \"memit\": named twice"});
  expect_refused(with("memit,emmet: v_lrr=1"), {"v_lrr", "did you mean \"v_lr\""});
  expect_refused(with("memit,emmet: layers=[7]"), {"layer 7", "0 to 3"});
  expect_refused(words("memit"), {"--out"});
  expect_refused({"bench", "--editors", "memit"}, {"--quality"});
  expect_refused({"bench", "--batch-size", "2"}, {"--quality"});
  auto timing = with("memit");
  timing.insert(timing.end(), {"--shape", "gpt2"});
  expect_refused(timing, {"--shape"});
  expect_refused({"bench", "--quality", "--out", path("out"), "--resume"}, {"holds no comparison"});
  EXPECT_FALSE(fs::exists(folder_ / "out"));
}

TEST_F(BenchQualityTest, TheFolderIsTheComparisonsOwn) {
  const auto with = [&](const char* out, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--out", path(out)});
    return words("memit: v_lr=1e-4", more);
  };
  fs::create_directories(folder_ / "notes");
  write_file(folder_ / "notes" / "mine.txt", "mine");
  expect_refused(with("notes"), {"holds mine.txt, which no comparison wrote"});
  const auto nothing = run_program("emend", {"bench", "--quality", "--out", path("notes")});
  EXPECT_EQ(nothing.status, 3) << nothing.err;
  must_run("emend", with("out"));
  expect_refused(with("out"), {"holds an earlier comparison", "--resume"});
  expect_refused(with("out", {"--resume", "--batch-size", "2"}), {"\"batch_size\" is \"2\" now; expected \"0\""});
  expect_refused(with("out", {"--resume", "--eval", "easyedit"}), {"\"eval\" is \"counterfact,free,easyedit\" now"});
  expect_refused(with("out/memit-v_lr=1e-4", {"--resume"}), {"which no comparison wrote"});
  // A run in it that began with other settings is no failure of the editor, to be written down for good.
  const fs::path one = folder_ / "out" / "memit-v_lr=1e-4";
  fs::remove(one / "results.json");
  fs::create_directories(one / "checkpoint");
  write_file(one / "checkpoint" / "settings.json", "{}");
  expect_refused(with("out", {"--resume"}), {"the facts are others now"});
  EXPECT_FALSE(fs::exists(one / "failure.json"));

  // Runs that memit_edit wrote stand in one table too; of other facts they do not.
  fs::create_directories(folder_ / "runs");
  for (const auto& [name, limit] : {std::pair("a", "5"), std::pair("b", "5"), std::pair("c", "4")})
    ASSERT_EQ(run_program("memit_edit", edit({"--facts", path("cities.jsonl"), "--limit", limit, "--eval", "free",
                                              "--out", path("runs") + "/" + name}))
                  .status,
              0);
  expect_refused({"bench", "--quality", "--out", path("runs")}, {"runs/c/results.json", "facts_file.fingerprint"});
  fs::remove_all(folder_ / "runs" / "c");
  const auto drawn = must_run("emend", {"bench", "--quality", "--out", path("runs")});
  EXPECT_NE(drawn.out.find("| a | "), std::string::npos) << drawn.out;
}

}  // namespace bench_quality_test
}  // namespace emend::testing
