// The report page, the files beside it and the comparison of runs, on made-up runs.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/report.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/error_of.h"
#include "support/sample_run.h"
#include "support/temporary_folder.h"

namespace emend::evaluation {
namespace report_test {

using emend::testing::sample_run;
using nlohmann::json;

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++n;
  return n;
}

constexpr const char* kDataBegin = "<script type=\"application/json\" id=\"data\">";

/// The text of the document that the page's script draws; what it draws is looked at in report_browser_test.
std::string data_text(const std::string& page) {
  const size_t begin = page.find(kDataBegin);
  if (begin == std::string::npos) return "";
  const size_t from = begin + std::string(kDataBegin).size();
  return page.substr(from, page.find("</script>", from) - from);
}

json data_of(const std::string& page) {
  return json::parse(data_text(page));
}

/// The page without the document: the template, whatever the run.
std::string frame_of(std::string page) {
  const std::string data = data_text(page);
  page.erase(page.find(kDataBegin) + std::string(kDataBegin).size(), data.size());
  const std::string nonce = page.substr(page.find("'nonce-") + 7, 32);
  for (size_t at = page.find(nonce); at != std::string::npos; at = page.find(nonce)) page.erase(at, nonce.size());
  return page;
}

TEST(Report, HoldsEveryPartAndTheExactNumbers) {
  const RunReport run = sample_run(32);
  const json data = data_of(render_report(run));
  EXPECT_EQ(data["page"], "edit");
  EXPECT_EQ(data["results"], run.results) << "the exact numbers";
  for (const char* part : {"command", "directory", "started", "versions", "machine", "notes", "layers",
                           "efficacy_by_edits", "memory", "placement"})
    EXPECT_EQ(data["extras"][part], run.extras[part]) << part;
  EXPECT_EQ(data["cards"]["shown"].size(), 32U);
  EXPECT_EQ(data["cases"]["all"], 32);
  EXPECT_EQ(data["cases"]["columns"], json({"efficacy", "paraphrases", "neighbours"}));
  EXPECT_EQ(data["curves"]["loss"]["all"], 32);
  EXPECT_EQ(data["curves"]["probability"]["shown"].size(), 32U);
  EXPECT_EQ(data["retention"]["values"].size(), 10U);
  ASSERT_EQ(data["families"].size(), 2U);
  EXPECT_EQ(data["families"][0]["name"], "counterfact");
  EXPECT_EQ(data["families"][0]["fields"][0]["definition"], metric_info("counterfact").fields[0].definition);
  EXPECT_EQ(data["families"][1]["keyed"], json({"locality", "portability"}));
}

TEST(Report, PutsFailedEditsFirstWithTheReason) {
  const json data = data_of(render_report(sample_run(32)));
  EXPECT_EQ(data["cases"]["failed"], 2);
  const auto& cards = data["cards"]["shown"];
  const auto& rows = data["cases"]["rows"];
  EXPECT_EQ(cards[0]["reason"], "failed: the loss stayed at 4.1 after 25 steps");
  EXPECT_NE(cards[1]["reason"].get<std::string>().find("the new answer is not the more probable one"),
            std::string::npos);
  EXPECT_EQ(cards[2]["reason"], "");
  EXPECT_EQ(rows[0]["id"], "1");
  EXPECT_EQ(rows[1]["failed"], true);
  EXPECT_EQ(rows[2]["state"], "applied");
}

TEST(Report, JudgesACaseByWhatItsFamiliesDeclare) {
  const auto reason = [](const json& metrics) {
    RunReport run;
    run.cases.push_back({{"case_id", 1}, {"status", "applied"}, {"metrics", {{"post", metrics}}}});
    return data_of(render_report(run))["cases"]["rows"][0]["state"].get<std::string>();
  };
  const json worse = {{"rewrite_prompts_probs", {{{"target_new", 2.0}, {"target_true", 1.0}}}}},
             alone = {{"rewrite_prompts_probs", {{{"target_new", 2.0}, {"target_true", nullptr}}}}};
  EXPECT_EQ(reason({{"counterfact", worse}, {"easyedit", {{"rewrite_acc", 1.0}}}}),
            "applied, but the new answer is not the more probable one (new 0.14, old 0.37)");
  EXPECT_EQ(reason({{"counterfact", alone}, {"easyedit", {{"rewrite_acc", 0.5}}}}),
            "applied, but the model does not say the target in full (50 % of its tokens)");
  EXPECT_EQ(reason({{"zsre", {{"rewrite_prompts_correct", {true, true}}}}}), "applied");
  EXPECT_EQ(reason({{"mquake", {{"edit_wise", false}}}}),
            "applied, but the model does not say the target in full (0 % of its tokens)");
  EXPECT_EQ(reason({{"generation", {{"ngram_entropy", 1.0}}}}), "applied") << "no family judged it";
}

TEST(Report, KeepsEveryTextOfTheRunData) {
  RunReport run = sample_run(3);
  const std::string hostile =
      "</script><script>alert('x')</script><!--\"><img src=x onerror=alert(1)>&\x01\xff {{nonce}}\u2028";
  testing::poison(run, hostile);
  const std::string page = render_report(run), text = data_text(page);
  EXPECT_EQ(frame_of(page), frame_of(render_report({}))) << "nothing outside the document depends on the run";
  for (const char* part : {"<", "\u2028", "\x01", "\xff"}) EXPECT_EQ(text.find(part), std::string::npos) << part;
  EXPECT_EQ(count(page, "</script>"), 2U);
  const std::string kept = data_of(page)["extras"]["command"].get<std::string>();
  EXPECT_EQ(kept, printable(hostile)) << "what would turn the text's direction is shown as its number";
}

TEST(Report, NeedsNoNetworkAndRunsItsOwnScriptOnly) {
  const std::string page = render_report(sample_run(10));
  for (const char* part : {"https:", "src=", "@import", "url(", "javascript:", "innerHTML", "document.write", "eval("})
    EXPECT_EQ(page.find(part), std::string::npos) << part;
  EXPECT_EQ(count(page, "http:"), 1U) << "the name space of SVG, which is no address";
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  const std::string nonce = page.substr(page.find("script-src 'nonce-") + 18, 32);
  EXPECT_EQ(nonce.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_NE(page.find("<script nonce=\"" + nonce + "\">"), std::string::npos);
  EXPECT_NE(render_report(sample_run(11)).find("script-src 'nonce-"), std::string::npos);
  EXPECT_EQ(render_report(sample_run(11)).find(nonce), std::string::npos) << "each run has its own";
  EXPECT_NE(page.find("prefers-color-scheme:dark"), std::string::npos);
  EXPECT_NE(page.find("width=device-width"), std::string::npos);
  EXPECT_NE(page.find("<noscript>"), std::string::npos);
}

TEST(Report, StaysUnderThreeMegabytesForAThousandFacts) {
  RunReport run = sample_run(1000);
  for (auto& line : run.cases) line["prompt"] = std::string(3000, 'x').append(" {} is");
  for (auto& words : run.extras["continuations"]) words["after"] = std::string(20000, 'y');
  const std::string page = render_report(run);
  EXPECT_LT(page.size(), size_t{3} << 20);
  EXPECT_EQ(data_of(page)["cases"]["rows"].size(), 1000U);
}

TEST(Report, TakesRunsWithAlmostNothing) {
  EXPECT_EQ(data_of(render_report({}))["cases"]["all"], 0);
  EXPECT_EQ(data_of(render_report(testing::odd_run()))["cases"]["all"], 2);
}

TEST(Report, RoundTripsThroughARunFolder) {
  const testing::TemporaryFolder folder("report-run");
  const RunReport run = sample_run(5);
  testing::write_sample(folder.path(), run);
  folder.write("report.json", run.extras.dump());
  const RunReport read = load_run(folder.path());
  EXPECT_EQ(render_report(read), render_report(run));
  folder.write("cases.jsonl", "{\"case_id\": 1}\n{broken\n");
  const auto told = emend::testing::error_of([&] { (void)load_run(folder.path()); }, ErrorClass::kCorruption);
  EXPECT_NE(told.find("cases.jsonl:2"), std::string::npos) << told;
  EXPECT_THROW((void)load_run(folder / "absent"), Error);
  folder.write("results.json", "{}");
  EXPECT_THROW((void)load_run(folder.path()), Error);
}

TEST(MetricsCsv, ListsEveryNumberOnce) {
  const RunReport run = sample_run(12);
  const std::string csv = metrics_csv(run.results);
  EXPECT_EQ(csv.substr(0, csv.find('\n')),
            "family,metric,paper_name,unit,before,after,change,ci95_before_low,ci95_before_high,ci95_after_low,ci95_"
            "after_high,n");
  const auto& post = run.results["metrics"]["counterfact"]["post"];
  EXPECT_NE(csv.find("counterfact,score,S,%,"), std::string::npos);
  EXPECT_NE(csv.find("," + post["efficacy_success"].dump() + ","), std::string::npos);
  EXPECT_NE(csv.find("easyedit,neighborhood_acc,locality: neighborhood_acc,%,,"), std::string::npos) << csv;
}

TEST(CaseFiles, HaveTheFormOfTheMemitRepository) {
  const testing::TemporaryFolder folder("report-cases");
  RunReport run = sample_run(4);
  run.cases[3]["case_id"] = "../../evil";
  run.cases[0]["relation_id"] = "P17";
  run.cases[0]["metrics"]["post"]["generation"] = {{"ngram_entropy", 5.5}, {"reference_score", nullptr}};
  run.cases[0]["metrics"]["post"]["counterfact"]["paraphrase_prompts_probs"] = json::array();
  run.cases[0]["metrics"]["post"]["counterfact"]["paraphrase_prompts_correct"] = json::array();
  EXPECT_EQ(write_case_files(folder.path(), run), 4);
  const json file = json::parse(read_file(folder / "4_edits-case_0.json"));
  EXPECT_EQ(file["num_edits"], 4);
  EXPECT_EQ(file["grouped_case_ids"].size(), 4U);
  EXPECT_EQ(file["requested_rewrite"]["target_new"]["str"], run.cases[0]["target"]);
  EXPECT_EQ(file["post"]["rewrite_prompts_probs"],
            run.cases[0]["metrics"]["post"]["counterfact"]["rewrite_prompts_probs"]);
  EXPECT_TRUE(file["pre"].contains("neighborhood_prompts_correct"));
  EXPECT_EQ(file["requested_rewrite"]["target_true"]["str"], run.cases[0]["target_true"]);
  EXPECT_EQ(file["requested_rewrite"]["relation_id"], "P17");
  EXPECT_EQ(file["post"]["ngram_entropy"], 5.5);
  for (const char* absent : {"reference_score", "paraphrase_prompts_probs", "paraphrase_prompts_correct"})
    EXPECT_FALSE(file["post"].contains(absent)) << absent << ": summarize.py takes the mean of what is there";
  EXPECT_FALSE(file.contains("time"));
  EXPECT_FALSE(json::parse(read_file(folder / "4_edits-case_1.json"))["requested_rewrite"].contains("relation_id"));
  EXPECT_TRUE(std::filesystem::exists(folder / "4_edits-case_.._.._evil.json"));
}

/// The row of one of counterfact's figures.
json row_of(const json& comparison, const std::string& metric) {
  for (const auto& row : comparison["differences"])
    if (row["family"] == "counterfact" && row["metric"] == metric) return row;
  throw std::out_of_range(metric);
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
  const json same = row_of(comparison, "efficacy_success");
  EXPECT_EQ(same["difference"], 0);
  EXPECT_EQ(same["significant"], false);
  const json broken = row_of(comparison, "paraphrase_success");
  EXPECT_LT(broken["difference"], -30);
  EXPECT_LT(broken["ci95"][1], 0);
  EXPECT_EQ(broken["significant"], true);
  EXPECT_LT(row_of(comparison, "score")["difference"], 0);
  // By hand: differences of twelve cases, -1 and eleven 0: mean -8.33, half width 2.2010 · 28.87 / √12.
  first.cases.resize(12);
  second.cases = first.cases;
  auto& pairs = second.cases[1]["metrics"]["post"]["counterfact"]["rewrite_prompts_probs"];
  first.cases[1]["metrics"]["post"]["counterfact"]["rewrite_prompts_probs"] = {
      {{"target_new", 0.1}, {"target_true", 5.0}}};
  const json pairs_failed = {{{"target_new", 5.0}, {"target_true", 0.1}}};
  pairs = pairs_failed;
  const json of_twelve = row_of(compare_runs(first, second), "efficacy_success");
  EXPECT_NEAR(of_twelve["difference"], -100.0 / 12, 1e-9);
  EXPECT_NEAR(of_twelve["ci95"][0], -100.0 / 12 - 2.2010 * 100 * std::sqrt(1.0 / 12) / std::sqrt(12.0), 1e-1);
  // Of three, Student's would reach from -177 to 110.
  first.cases.resize(3);
  second.cases.resize(3);
  EXPECT_EQ(row_of(compare_runs(first, second), "efficacy_success")["ci95"], json({-100.0, 100.0}));
  // Two of two that differ alike are no certainty: √0.025 of all do at least, and the others may differ the other way.
  first.cases.erase(first.cases.begin());
  second.cases.erase(second.cases.begin());
  first.cases[1]["metrics"]["post"]["counterfact"]["rewrite_prompts_probs"] =
      first.cases[0]["metrics"]["post"]["counterfact"]["rewrite_prompts_probs"];
  second.cases[1]["metrics"]["post"]["counterfact"]["rewrite_prompts_probs"] = pairs_failed;
  const json of_two = row_of(compare_runs(first, second), "efficacy_success");
  EXPECT_EQ(of_two["difference"], -100);
  EXPECT_NEAR(of_two["ci95"][1], 100 * (1 - 2 * std::sqrt(0.025)), 0.01);
  EXPECT_EQ(of_two["significant"], false);
  const std::string text = format_comparison(comparison);
  EXPECT_NE(text.find("paraphrase_success"), std::string::npos);
  EXPECT_EQ(count(text, "\n* the interval does not contain 0"), 1U);
}

TEST(CompareRuns, MoreCasesThatChangeOneWayAreNoWeakerEvidence) {
  const auto significant = [](size_t n, size_t changed) {
    RunReport first = sample_run(n, 1), second = first;
    for (size_t i = 0; i < n; ++i)
      for (auto* run : {&first, &second}) {
        const bool said = run == &second && i < changed;
        run->cases[i]["metrics"]["post"]["counterfact"]["rewrite_prompts_probs"] = {
            {{"target_new", said ? 0.1 : 5.0}, {"target_true", said ? 5.0 : 0.1}}};
      }
    return row_of(compare_runs(first, second), "efficacy_success")["significant"].get<bool>();
  };
  // McNemar's exact test: 2 · 0.5^k is 0.125, 0.0625 and 0.031 for k of 4, 5 and 6.
  EXPECT_FALSE(significant(5, 4));
  EXPECT_FALSE(significant(5, 5));
  EXPECT_FALSE(significant(40, 5));
  EXPECT_TRUE(significant(6, 6));
  EXPECT_TRUE(significant(40, 6));
}

TEST(CompareRuns, SmallFiguresKeepTheirDigits) {
  const auto row = [](const char* family, const char* metric, const char* unit) {
    return json{{"family", family}, {"metric", metric},     {"unit", unit},           {"first", 0.012},
                {"second", 0.0155}, {"difference", 0.0035}, {"ci95", {0.001, 0.006}}, {"n", 9}};
  };
  const std::string text = format_comparison(
      {{"differences",
        {row("free", "neutral_kl", "nat"), row("free", "entropy", "bit"), row("counterfact", "efficacy_magnitude", "%"),
         row("counterfact", "efficacy_success", "%")}}});
  EXPECT_NE(text.find("0.0120  0.0155     +0.0035  0.0010 … 0.0060"), std::string::npos) << text;
  EXPECT_EQ(count(text, "0.01    0.02       +0.00      0.00 … 0.01"), 2U) << text;
  EXPECT_NE(text.find("0.0     0.0        +0.0        0.0 … 0.0"), std::string::npos) << text;
}

TEST(CompareRuns, AScoreOfTwoCasesIsNoEvidence) {
  // All successes, and neighbours 1/2 and 3/5 right in one run, 3/5 and 9/10 in the other.
  RunReport first = sample_run(2, 1), second = sample_run(2, 1);
  const auto right = [](RunReport& run, size_t i, int correct, int of) {
    auto& metrics = run.cases[i]["metrics"]["post"]["counterfact"];
    for (const char* asked : {"rewrite_prompts_probs", "paraphrase_prompts_probs"})
      for (auto& pair : metrics[asked]) pair = {{"target_new", 0.1}, {"target_true", 5.0}};
    metrics["neighborhood_prompts_probs"] = json::array();
    for (int n = 0; n < of; ++n)
      metrics["neighborhood_prompts_probs"].push_back(
          {{"target_new", n < correct ? 5.0 : 0.1}, {"target_true", n < correct ? 0.1 : 5.0}});
  };
  right(first, 0, 1, 2);
  right(first, 1, 3, 5);
  right(second, 0, 3, 5);
  right(second, 1, 9, 10);
  const json row = row_of(compare_runs(first, second), "score");
  // Shares 0.55 and 0.75: 3/(2 + 1/s); of the pseudo-values 2 d - d_i the half range times 12.7 is half the interval.
  const auto score = [](double share) { return 100 * 3 / (2 + 1 / share); };
  const double difference = score(0.75) - score(0.55), one = score(0.9) - score(0.6), other = score(0.6) - score(0.5);
  EXPECT_NEAR(row["difference"], difference, 1e-9);
  EXPECT_NEAR(row["ci95"][1].get<double>() - difference, 12.7062 * (one - other) / 2, 1e-6);
  EXPECT_EQ(row["significant"], false);
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
  // Figures that no case has, and what one run alone has measured.
  for (auto* run : {&first, &second})
    run->results["metrics"].update({{"free", {{"post", {{"neutral_kl", 0.1}, {"edit_begins", 90.0}}}}},
                                    {"mquake", {{"post", {{"multi_hop", 9.0}}}}},
                                    {"health", {{"post", {{"perplexity", 20.0}, {"divergence", nullptr}}}}}});
  first.results["metrics"]["zsre"]["post"]["score"] = 1;
  const json told = compare_runs(first, second)["notes"];
  for (const char* expected : {"not compared, as they are of no single case: neutral_kl (free, in results.json)",
                               "not compared, as they are of no single case: perplexity (health, in results.json)",
                               "not compared, as they are of groups of cases: multi_hop (mquake, in results.json)",
                               "not compared, as they are under the facts' own keys: locality (easyedit, in "
                               "results.json)",
                               "not compared, as they were measured in one run only: zsre"})
    EXPECT_EQ(std::count(told.begin(), told.end(), json(expected)), 1) << expected << '\n' << told;
}

TEST(Values, FormatNumbersForPeople) {
  EXPECT_EQ(detail::fixed(85.84), "85.8");
  EXPECT_EQ(detail::fixed(62.5, 0), "63") << "as a page's script has it";
  EXPECT_EQ(detail::fixed(-0.125, 2), "-0.13");
  EXPECT_EQ(detail::fixed(-0.0004, 2), "0.00");
  EXPECT_EQ(detail::fixed(0.615, 2), "0.61") << "the number is below the half";
  EXPECT_EQ(detail::fixed(std::nullopt), "–");
  EXPECT_EQ(detail::fixed(NAN), "–");
  EXPECT_EQ(detail::probability(0.00001), "< 0.001");
  EXPECT_EQ(shortened("żółw", 3), "żó…");
}

}  // namespace report_test
}  // namespace emend::evaluation
