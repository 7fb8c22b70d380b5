// CounterFact's figures on hand-made scores.
#include <emend/evaluation/statistics.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/hand_scores.h"

namespace emend::evaluation {
namespace counterfact_metric_test {

/// A score of one token with the given probability; `right` makes it the argmax.
Score token(double probability, bool right) {
  return {{5}, {right ? 5 : 6}, {std::log(probability)}};
}

datasets::Fact fact(bool with_true = true) {
  datasets::Fact fact;
  fact.prompt = "{} is in";
  fact.subject = "X";
  fact.target_new = "Rome";
  if (with_true) fact.target_true = "Paris";
  return fact;
}

/// Over scores that `give` makes from prompt and target.
template <class Give>
MetricOutcome judge(const datasets::FactSet& facts, Give give) {
  return testing::judged("counterfact", facts, give);
}

TEST(Counterfact, ComputesEveryFigureAsDefined) {
  datasets::FactSet facts;
  facts.facts = {fact(), fact()};
  facts.facts[0].paraphrase_prompts = {"p1", "p2"};
  facts.facts[0].neighborhood_prompts = {"n1", "n2", "n3", "n4"};
  facts.facts[1].subject = "Y";
  facts.facts[1].paraphrase_prompts = {"p3"};
  facts.facts[1].neighborhood_prompts = {"n5"};
  const std::map<ScoreRequest, Score> table = {
      {{"X is in", "Rome"}, token(0.6, true)},  {{"X is in", "Paris"}, token(0.1, false)},  // success, right
      {{"p1", "Rome"}, token(0.3, false)},      {{"p1", "Paris"}, token(0.2, false)},       // success, wrong
      {{"p2", "Rome"}, token(0.1, false)},      {{"p2", "Paris"}, token(0.4, true)},        // fails
      {{"n1", "Rome"}, token(0.1, false)},      {{"n1", "Paris"}, token(0.5, true)},        // kept, right
      {{"n2", "Rome"}, token(0.1, false)},      {{"n2", "Paris"}, token(0.2, false)},       // kept, wrong
      {{"n3", "Rome"}, token(0.7, true)},       {{"n3", "Paris"}, token(0.1, false)},       // lost
      {{"n4", "Rome"}, token(0.25, false)},     {{"n4", "Paris"}, token(0.25, false)},      // a tie is not a success
      {{"Y is in", "Rome"}, token(0.2, false)}, {{"Y is in", "Paris"}, token(0.2, false)},  // a tie is not a success
      {{"p3", "Rome"}, token(0.9, true)},       {{"p3", "Paris"}, token(0.01, false)},
      {{"n5", "Rome"}, token(0.01, false)},     {{"n5", "Paris"}, token(0.9, true)},
  };
  const auto outcome = judge(facts, [&](const ScoreRequest& request) { return table.at(request); });
  const auto& summary = outcome.summary;
  EXPECT_EQ(summary["n"], 2);
  EXPECT_DOUBLE_EQ(summary["efficacy_success"], 50);      // (1 + 0) / 2
  EXPECT_DOUBLE_EQ(summary["paraphrase_success"], 75);    // (1/2 + 1) / 2
  EXPECT_DOUBLE_EQ(summary["neighborhood_success"], 75);  // (2/4 + 1) / 2
  EXPECT_DOUBLE_EQ(summary["efficacy_accuracy"], 50);
  EXPECT_DOUBLE_EQ(summary["paraphrase_accuracy"], 50);         // (0 + 1) / 2
  EXPECT_DOUBLE_EQ(summary["neighborhood_accuracy"], 62.5);     // (1/4 + 1) / 2
  EXPECT_NEAR(summary["efficacy_magnitude"], 25, 1e-9);         // (0.5 + 0) / 2
  EXPECT_NEAR(summary["paraphrase_magnitude"], 39.5, 1e-9);     // ((0.1 - 0.3) / 2 + 0.89) / 2
  EXPECT_NEAR(summary["neighborhood_magnitude"], 43.25, 1e-9);  // ((0.4 + 0.1 - 0.6 + 0) / 4 + 0.89) / 2
  EXPECT_NEAR(summary["score"], 3 / (1 / 50.0 + 1 / 75.0 + 1 / 75.0), 1e-9);
  const auto share = share_interval(0.75, 2);
  EXPECT_EQ(summary["ci95"]["paraphrase_success"], nlohmann::json({100 * share.first, 100 * share.second}));
  // Student's, of 0.5 and 0: 12.706 · 0.25 to both sides of 0.25, cut where differences of probabilities end.
  EXPECT_EQ(summary["ci95"]["efficacy_magnitude"], nlohmann::json({-100.0, 100.0})) << "a difference is no share";
  EXPECT_NEAR(summary["std"]["paraphrase_success"], 25, 1e-9);
  EXPECT_EQ(summary["counts"]["paraphrase_success"], 2);
  // Raw values, named as in the MEMIT repository's files.
  const auto& row = outcome.cases[0];
  EXPECT_NEAR(row["rewrite_prompts_probs"][0]["target_new"], -std::log(0.6), 1e-12);
  EXPECT_NEAR(row["neighborhood_prompts_probs"][2]["target_true"], -std::log(0.1), 1e-12);
  EXPECT_EQ(row["neighborhood_prompts_correct"], nlohmann::json({true, false, false, false}));
}

TEST(MetricField, IntervalsEndWhereItsFiguresDo) {
  const auto limits = [](const char* family, const std::string& key) {
    return metric_info(family).field(key)->limits();
  };
  const double none = std::numeric_limits<double>::infinity();
  EXPECT_EQ(limits("counterfact", "efficacy_success"), Interval(0, 1));
  EXPECT_EQ(limits("counterfact", "neighborhood_magnitude"), Interval(-1, 1));
  EXPECT_EQ(limits("generation", "reference_score"), Interval(0, 1));
  for (const auto& [family, key] : {std::pair("generation", "ngram_entropy"), std::pair("generation", "essence_score"),
                                    std::pair("easyedit", "fluency"), std::pair("free", "neighborhood_kl")})
    EXPECT_EQ(limits(family, key), Interval(0, none)) << key;
  // Two texts of 1 and 0: Student's would begin at 0.5 - 6.35.
  const MetricContext context{{}, {}};
  struct Made final : Metric {
    using Metric::Metric;
    void plan(const MetricContext&, ScoreSheet&) override {}
    void measure(const MetricContext&) override {
      for (const double value : {1.0, 0.0})
        outcome_.cases.push_back({{"ngram_entropy", value}, {"reference_score", value}});
    }
  } made(metric_info("generation"));
  const auto summary = made.finish(context).summary;
  EXPECT_EQ(summary["ci95"]["reference_score"], nlohmann::json({0.0, 100.0}));
  EXPECT_EQ(summary["ci95"]["ngram_entropy"][0], 0);
  EXPECT_GT(summary["ci95"]["ngram_entropy"][1], 600);
}

TEST(Counterfact, ComparesMeansPerTokenNotSums) {
  datasets::FactSet facts;
  facts.facts = {fact()};
  // New: two tokens of 0.5 (sum worse, mean better than one token of 0.4).
  const auto outcome = judge(facts, [](const ScoreRequest& request) {
    if (request.target == "Rome") return Score{{5, 6}, {5, 7}, {std::log(0.5), std::log(0.5)}};
    return token(0.4, false);
  });
  EXPECT_DOUBLE_EQ(outcome.summary["efficacy_success"], 100);
  EXPECT_DOUBLE_EQ(outcome.summary["efficacy_accuracy"], 0);  // one of two tokens is not enough
  EXPECT_NEAR(outcome.summary["efficacy_magnitude"], 10, 1e-9);
}

TEST(Counterfact, GivesNullWhereTheFactsHaveNoPrompts) {
  datasets::FactSet facts;
  facts.facts = {fact(false), fact(false)};
  auto outcome = judge(facts, [](const ScoreRequest&) { return token(0.5, true); });
  EXPECT_TRUE(outcome.summary["score"].is_null());
  EXPECT_TRUE(outcome.summary["efficacy_success"].is_null());
  EXPECT_TRUE(outcome.summary["paraphrase_success"].is_null());
  EXPECT_TRUE(outcome.summary["neighborhood_accuracy"].is_null());
  EXPECT_DOUBLE_EQ(outcome.summary["efficacy_accuracy"], 100);
  // One record with paraphrases, one without: only the first counts there.
  facts.facts[0].paraphrase_prompts = {"p"};
  outcome = judge(facts, [](const ScoreRequest& request) { return token(0.5, request.prompt != "p"); });
  EXPECT_DOUBLE_EQ(outcome.summary["paraphrase_accuracy"], 0);
  EXPECT_EQ(outcome.summary["counts"]["paraphrase_accuracy"], 1);
  EXPECT_DOUBLE_EQ(outcome.summary["efficacy_accuracy"], 100);
  facts.facts.clear();
  outcome = judge(facts, [](const ScoreRequest&) { return token(0.5, true); });
  EXPECT_EQ(outcome.summary["n"], 0);
  EXPECT_TRUE(outcome.summary["score"].is_null());
}

TEST(Counterfact, HasAllKeysOfTheContract) {
  datasets::FactSet facts;
  facts.facts = {fact()};
  facts.facts[0].paraphrase_prompts = {"p"};
  facts.facts[0].neighborhood_prompts = {"n"};
  const auto outcome =
      judge(facts, [](const ScoreRequest& request) { return token(request.target == "Rome" ? 0.5 : 0.25, true); });
  for (const char* key : {"score", "efficacy_success", "paraphrase_success", "neighborhood_success",
                          "efficacy_accuracy", "paraphrase_accuracy", "neighborhood_accuracy", "n"})
    EXPECT_TRUE(outcome.summary.contains(key) && outcome.summary[key].is_number()) << key;
  EXPECT_EQ(outcome.summary["score"], 0);  // neighbourhood success is 0
}

}  // namespace counterfact_metric_test
}  // namespace emend::evaluation
