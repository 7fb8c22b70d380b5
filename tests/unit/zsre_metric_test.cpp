// zsRE's figures on hand-made scores.
#include <emend/evaluation/metric.h>
#include <gtest/gtest.h>

namespace emend::evaluation {
namespace zsre_metric_test {

TEST(Zsre, AveragesTokensThenRecords) {
  datasets::FactSet facts;
  facts.format = "zsre";
  datasets::Fact fact;
  fact.prompt = "Where did {} study?";
  fact.subject = "Ann";
  fact.target_new = "Bergen College";
  fact.paraphrase_prompts = {"Ann studied where?"};
  fact.locality["loc"] = {{"nq question: who wrote it", {"T. L."}}};
  facts.facts = {fact, fact};
  facts.facts[1].subject = "Bob";
  facts.facts[1].paraphrase_prompts = {"Bob studied where?"};
  facts.facts[1].locality.clear();
  const EvaluateOptions options;
  const MetricContext context{facts, options};
  auto metric = make_metric("zsre");
  EXPECT_TRUE(metric->suits(facts));
  ScoreSheet sheet;
  metric->plan(context, sheet);
  const std::map<std::string, Score> table = {
      {"Where did Ann study?", {{1, 2, 3}, {1, 2, 9}, {0, 0, 0}}},                 // 2/3
      {"Ann studied where?", {{1, 2, 3}, {9, 9, 3}, {0, 0, 0}}},                   // 1/3
      {"nq question: who wrote it?", {{4, 5, 6, 7}, {4, 5, 6, 9}, {0, 0, 0, 0}}},  // 3/4; the question mark is added
      {"Where did Bob study?", {{1, 2, 3}, {1, 2, 3}, {0, 0, 0}}},                 // 1
      {"Bob studied where?", {{1, 2, 3}, {1, 2, 3}, {0, 0, 0}}},
  };
  std::vector<Score> scores;
  for (const auto& request : sheet.requests()) scores.push_back(table.at(request.prompt));
  sheet.fill(scores);
  const auto outcome = metric->finish(context, sheet);
  const auto& summary = outcome.summary;
  EXPECT_NEAR(summary["efficacy_accuracy"], 100 * (2.0 / 3 + 1) / 2, 1e-9);
  EXPECT_NEAR(summary["paraphrase_accuracy"], 100 * (1.0 / 3 + 1) / 2, 1e-9);
  EXPECT_NEAR(summary["neighborhood_accuracy"], 75, 1e-9);
  EXPECT_EQ(summary["counts"]["neighborhood_accuracy"], 1);
  EXPECT_NEAR(summary["score"], 3 / (6 / 500.0 + 3 / 200.0 + 1 / 75.0), 1e-9);
  EXPECT_EQ(outcome.cases[0]["rewrite_prompts_correct"], nlohmann::json({true, true, false}));
  EXPECT_EQ(outcome.cases[1]["neighborhood_prompts_correct"], nlohmann::json::array());
}

}  // namespace zsre_metric_test
}  // namespace emend::evaluation
