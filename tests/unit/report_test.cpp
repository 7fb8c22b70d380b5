// The report page, the files beside it and the comparison of runs, on made-up runs.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/evaluation/detail/charts.h>
#include <emend/evaluation/detail/html.h>
#include <emend/evaluation/report.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "support/sample_run.h"

namespace emend::evaluation {
namespace {

using emend::testing::sample_run;
using nlohmann::json;

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++n;
  return n;
}

/// Every element that is opened is closed in the right order; attributes are quoted.
::testing::AssertionResult well_formed(const std::string& page) {
  static const std::vector<std::string> empty = {"meta", "link", "line", "rect", "path", "circle", "!DOCTYPE"};
  std::vector<std::string> open;
  for (size_t at = page.find('<'); at != std::string::npos; at = page.find('<', at + 1)) {
    const size_t end = page.find('>', at);
    if (end == std::string::npos) return ::testing::AssertionFailure() << "unclosed tag at " << page.substr(at, 60);
    const std::string tag = page.substr(at + 1, end - at - 1);
    const std::string name = tag.substr(tag[0] == '/' ? 1 : 0, tag.find_first_of(" />", 1) - (tag[0] == '/' ? 1 : 0));
    if (std::count(tag.begin(), tag.end(), '"') % 2 != 0)
      return ::testing::AssertionFailure() << "open quote in <" << tag;
    if (name == "style" && tag[0] != '/') at = page.find("</style>", at) - 1;
    if (std::find(empty.begin(), empty.end(), name) != empty.end() || tag.back() == '/') continue;
    if (tag[0] != '/') {
      open.push_back(name);
    } else if (open.empty() || open.back() != name) {
      return ::testing::AssertionFailure() << "</" << name << "> closes <" << (open.empty() ? "" : open.back())
                                           << "> near " << page.substr(at > 200 ? at - 200 : 0, 260);
    } else {
      open.pop_back();
    }
  }
  return open.empty() ? ::testing::AssertionSuccess()
                      : ::testing::AssertionFailure() << "<" << open.back() << "> is never closed";
}

TEST(Report, ShowsEverySectionAndTheExactNumbers) {
  const RunReport run = sample_run(32);
  const std::string page = render_report(run);
  EXPECT_TRUE(well_formed(page));
  for (const char* part :
       {"What this edit did", "In words", "Measured", "How it went", "Where it ran", "Every edit", "To do it again",
        "Loss while looking for the targets", "Size of the update", "Spectrum of the update",
        "Against the number of edits", "Retention", "Time by phase", "Peak memory by device", "memit_edit --model"})
    EXPECT_NE(page.find(part), std::string::npos) << part;
  const auto& post = run.results["metrics"]["counterfact"]["post"];
  for (const char* key : {"score", "efficacy_success", "neighborhood_accuracy"})
    EXPECT_NE(
        page.find("data-metric=\"counterfact." + std::string(key) + ".post\" data-value=\"" + post[key].dump() + "\""),
        std::string::npos)
        << key;
  EXPECT_NE(page.find("title=\"Harmonic mean of the three success rates"), std::string::npos);
}

TEST(Report, PutsFailedEditsFirstWithTheReason) {
  const std::string page = render_report(sample_run(32));
  const size_t failed = page.find("loss stayed at 4.1"), section = page.find("In words"),
               first_good = page.find("<div class=\"card\"><p>", section);
  ASSERT_NE(failed, std::string::npos);
  EXPECT_LT(failed, first_good);
  EXPECT_NE(page.find("the new answer is not the more probable one"), std::string::npos);
}

TEST(Report, EscapesEveryTextOfTheRun) {
  RunReport run = sample_run(3);
  const std::string hostile = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>&\x01\xff";
  // Every string in the run becomes hostile, and so do the keys that are shown.
  std::function<void(json&)> poison = [&](json& value) {
    if (value.is_string()) value = hostile;
    if (value.is_structured())
      for (auto& item : value) poison(item);
  };
  poison(run.results);
  poison(run.extras);
  for (auto& line : run.cases) poison(line);
  run.results["seconds"][hostile] = 1.0;
  run.results["peak_bytes"][hostile] = 1e9;
  run.extras["versions"][hostile] = hostile;
  run.extras["memory"][hostile] = {{"peak", 1e9}};
  run.results["metrics"]["easyedit"]["post"]["locality"][hostile] = 50.0;
  const std::string page = render_report(run);
  EXPECT_TRUE(well_formed(page));
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_EQ(page.find("<img"), std::string::npos);
  EXPECT_EQ(page.find("'x'"), std::string::npos);
  EXPECT_EQ(page.find('\x01'), std::string::npos);
  EXPECT_EQ(page.find('\xff'), std::string::npos);
}

TEST(Report, NeedsNoNetworkAndNoScript) {
  const std::string page = render_report(sample_run(10));
  for (const char* part : {"http:", "https:", "src=", "@import", "url(", "<script", "javascript:"})
    EXPECT_EQ(page.find(part), std::string::npos) << part;
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  EXPECT_NE(page.find("prefers-color-scheme:dark"), std::string::npos);
  EXPECT_NE(page.find("width=device-width"), std::string::npos);
}

TEST(Report, StaysUnderThreeMegabytesForAThousandFacts) {
  RunReport run = sample_run(1000);
  for (auto& line : run.cases) line["prompt"] = std::string(3000, 'x').append(" {} is");
  for (auto& words : run.extras["continuations"]) words["after"] = std::string(20000, 'y');
  const std::string page = render_report(run);
  EXPECT_LT(page.size(), size_t{3} << 20);
  EXPECT_GT(count(page, "<tr>"), 1000U);
}

TEST(Report, TakesRunsWithAlmostNothing) {
  EXPECT_TRUE(well_formed(render_report({})));
  RunReport run;
  run.results = {{"metrics", {{"counterfact", {{"post", {{"score", nullptr}, {"n", 0}}}}}}},
                 {"model", "x"},
                 {"seconds", 3},
                 {"device_map", json::array()}};
  run.cases = {json::object(), {{"case_id", "a"}, {"metrics", 3}, {"status", nullptr}}};
  run.extras = {{"curves", {{{"loss", {1.0}}}, 3, nullptr}},
                {"layers", {3}},
                {"retention", {{"probability", {{1.0, nullptr}, 3}}}},
                {"continuations", {nullptr}}};
  EXPECT_TRUE(well_formed(render_report(run)));
}

TEST(Report, RoundTripsThroughARunFolder) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "emend-report-run";
  std::filesystem::create_directories(folder);
  const RunReport run = sample_run(5);
  write_file(folder / "results.json", run.results.dump());
  std::string lines;
  for (const auto& line : run.cases) lines += line.dump() + "\n";
  write_file(folder / "cases.jsonl", lines);
  write_file(folder / "report.json", run.extras.dump());
  const RunReport read = load_run(folder);
  EXPECT_EQ(render_report(read), render_report(run));
  write_file(folder / "cases.jsonl", "{\"case_id\": 1}\n{broken\n");
  try {
    (void)load_run(folder);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.error_class(), ErrorClass::kCorruption);
    EXPECT_NE(std::string(error.what()).find("cases.jsonl:2"), std::string::npos) << error.what();
  }
  EXPECT_THROW((void)load_run(folder / "absent"), Error);
  std::filesystem::remove_all(folder);
}

TEST(MetricsCsv, ListsEveryNumberOnce) {
  const RunReport run = sample_run(12);
  const std::string csv = metrics_csv(run.results);
  EXPECT_EQ(csv.substr(0, csv.find('\n')),
            "family,metric,paper_name,unit,before,after,change,ci95_before,ci95_after,n");
  const auto& post = run.results["metrics"]["counterfact"]["post"];
  EXPECT_NE(csv.find("counterfact,score,S,%,"), std::string::npos);
  EXPECT_NE(csv.find("," + post["efficacy_success"].dump() + ","), std::string::npos);
  EXPECT_NE(csv.find("easyedit,neighborhood_acc,locality: neighborhood_acc,%,,"), std::string::npos) << csv;
}

TEST(CaseFiles, HaveTheFormOfTheMemitRepository) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "emend-report-cases";
  std::filesystem::remove_all(folder);
  RunReport run = sample_run(4);
  run.cases[3]["case_id"] = "../../evil";
  EXPECT_EQ(write_case_files(folder, run), 4);
  const json file = json::parse(read_file(folder / "4_edits-case_0.json"));
  EXPECT_EQ(file["num_edits"], 4);
  EXPECT_EQ(file["grouped_case_ids"].size(), 4U);
  EXPECT_EQ(file["requested_rewrite"]["target_new"]["str"], run.cases[0]["target"]);
  EXPECT_EQ(file["post"]["rewrite_prompts_probs"],
            run.cases[0]["metrics"]["post"]["counterfact"]["rewrite_prompts_probs"]);
  EXPECT_TRUE(file["pre"].contains("neighborhood_prompts_correct"));
  EXPECT_TRUE(std::filesystem::exists(folder / "4_edits-case_.._.._evil.json"));
  std::filesystem::remove_all(folder);
}

TEST(CompareRuns, GivesPairedDifferencesWithIntervals) {
  RunReport first = sample_run(40, 1), second = sample_run(40, 1);
  // The second run breaks the paraphrases of every other case.
  for (size_t i = 0; i < second.cases.size(); i += 2)
    for (auto& pair : second.cases[i]["metrics"]["post"]["counterfact"]["paraphrase_prompts_probs"])
      std::swap(pair["target_new"], pair["target_true"]);
  const json comparison = compare_runs(first, second);
  EXPECT_EQ(comparison["paired_cases"], 40);
  EXPECT_EQ(comparison["same_facts"], true);
  std::map<std::string, json> rows;
  for (const auto& row : comparison["differences"])
    rows[row["family"].get<std::string>() + "." + row["metric"].get<std::string>()] = row;
  const auto& same = rows.at("counterfact.efficacy_success");
  EXPECT_EQ(same["difference"], 0);
  EXPECT_EQ(same["significant"], false);
  const auto& broken = rows.at("counterfact.paraphrase_success");
  EXPECT_LT(broken["difference"], -30);
  EXPECT_LT(broken["ci95"][1], 0);
  EXPECT_EQ(broken["significant"], true);
  EXPECT_LT(rows.at("counterfact.score")["difference"], 0);
  // By hand: differences of three cases -1, 0, 0: mean -33.3, deviation 57.7, half width 1.96 · 57.7 / √3.
  first.cases.resize(3);
  second.cases = first.cases;
  auto& pairs = second.cases[1]["metrics"]["post"]["counterfact"]["rewrite_prompts_probs"];
  first.cases[1]["metrics"]["post"]["counterfact"]["rewrite_prompts_probs"] = {
      {{"target_new", 0.1}, {"target_true", 5.0}}};
  pairs = {{{"target_new", 5.0}, {"target_true", 0.1}}};
  const auto compared = compare_runs(first, second);
  for (const auto& row : compared["differences"]) {
    if (row["family"] != "counterfact" || row["metric"] != "efficacy_success") continue;
    EXPECT_NEAR(row["difference"], -100.0 / 3, 1e-9);
    EXPECT_NEAR(row["ci95"][0], -100.0 / 3 - 1.96 * 100 * std::sqrt(1.0 / 3) / std::sqrt(3.0), 1e-9);
  }
  const std::string text = format_comparison(comparison);
  EXPECT_NE(text.find("paraphrase_success"), std::string::npos);
  EXPECT_EQ(count(text, "\n* the interval does not contain 0"), 1U);
}

TEST(CompareRuns, SaysWhatCannotBePaired) {
  RunReport first = sample_run(4), second = sample_run(6);
  second.cases[1]["target"] = "elsewhere";
  second.cases[5]["case_id"] = second.cases[4]["case_id"];
  const json comparison = compare_runs(first, second);
  EXPECT_EQ(comparison["paired_cases"], 4);
  EXPECT_EQ(comparison["same_facts"], false);
  const std::string notes = comparison["notes"].dump();
  EXPECT_NE(notes.find("another prompt, subject or target"), std::string::npos) << notes;
  EXPECT_NE(notes.find("occur twice"), std::string::npos) << notes;
  EXPECT_EQ(compare_runs({}, {})["paired_cases"], 0);
}

TEST(Charts, ChooseRoundTicks) {
  EXPECT_EQ(detail::ticks(0, 100, 5), (std::vector<double>{0, 20, 40, 60, 80, 100}));
  EXPECT_EQ(detail::ticks(-1, 1, 4), (std::vector<double>{-1, -0.5, 0, 0.5, 1}));
  const auto small = detail::ticks(0.0012, 0.0031, 5);
  ASSERT_EQ(small.size(), 4U);
  EXPECT_NEAR(small[0], 0.0015, 1e-12);
}

TEST(Html, FormatsNumbersForPeople) {
  EXPECT_EQ(detail::fixed(85.84), "85.8");
  EXPECT_EQ(detail::fixed(std::nullopt), "–");
  EXPECT_EQ(detail::fixed(NAN), "–");
  EXPECT_EQ(detail::grouped(134515008), "134,515,008");
  EXPECT_EQ(detail::grouped(-12), "-12");
  EXPECT_EQ(detail::probability(0.00001), "< 0.001");
  EXPECT_EQ(detail::duration(3.14159), "3.14 s");
  EXPECT_EQ(detail::duration(200), "3 min 20 s");
  EXPECT_EQ(detail::duration(7500), "2 h 05 min");
  EXPECT_EQ(detail::bytes(1.5 * (1 << 30)), "1.5 GiB");
  EXPECT_EQ(detail::shorten("żółw", 2), "żó…");
  EXPECT_EQ(detail::escape("a<b>&\"'\n"), "a&lt;b&gt;&amp;&quot;&#39;\n");
}

}  // namespace
}  // namespace emend::evaluation
