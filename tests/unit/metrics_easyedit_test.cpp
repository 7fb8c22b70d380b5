// EasyEdit's, zsRE's and MQuAKE's figures on hand-made scores; names, "auto" and the conformance of all families.
#include <gtest/gtest.h>

#include <set>

#include "support/error_of.h"
#include "support/hand_scores.h"

namespace emend::evaluation {
namespace metrics_easyedit_test {

Score tokens(std::vector<int64_t> predicted) {
  std::vector<int64_t> labels(predicted.size(), 1);
  return {labels, predicted, std::vector<double>(predicted.size(), -1.0)};
}

datasets::Fact fact() {
  datasets::Fact fact;
  fact.prompt = "{} is led by";
  fact.subject = "Nordhaven";
  fact.target_new = "Iris Vold";
  return fact;
}

MetricOutcome judge(const datasets::FactSet& facts, const std::map<ScoreRequest, Score>& table,
                    const Evaluation* before = nullptr) {
  const auto give = [&](const ScoreRequest& request) {
    EXPECT_TRUE(table.count(request)) << request.prompt << " | " << request.target;
    return table.count(request) ? table.at(request) : tokens({0});
  };
  return testing::judged("easyedit", facts, give, {.before = before});
}

TEST(EasyEdit, ComputesEveryFigureAsDefined) {
  datasets::FactSet facts;
  facts.facts = {fact()};
  auto& one = facts.facts[0];
  one.paraphrase_prompts = {"r1", "r2"};
  one.portability["Reasoning"] = {{"q1", {"Leo", "alias"}}, {"q2", {"Max"}}};
  one.portability["Subject_Aliasing"] = {{"q3", {"Iris Vold"}}};
  one.locality["Relation_Specificity"] = {{"l1", {"31 km2"}}, {"l2", {"x"}}};
  one.target_true = "Per Aas";
  one.neighborhood_prompts = {"n1"};
  std::map<ScoreRequest, Score> table = {
      {{"Nordhaven is led by", "Iris Vold"}, tokens({1, 1, 0, 1})},  // 3/4
      {{"r1", "Iris Vold"}, tokens({1, 1, 1, 1})},
      {{"r2", "Iris Vold"}, tokens({0, 1, 0, 0})},  // (1 + 1/4) / 2
      {{"q1", "Leo"}, tokens({1, 0})},              // the first answer counts
      {{"q2", "Max"}, tokens({1})},                 // Reasoning (1/2 + 1) / 2
      {{"q3", "Iris Vold"}, tokens({0, 0})},
      {{"l1", "31 km2"}, tokens({7, 8, 9})},
      {{"l2", "x"}, tokens({4})},
      {{"n1", "Per Aas"}, tokens({1, 3})},
  };
  auto outcome = judge(facts, table);
  EXPECT_DOUBLE_EQ(outcome.summary["rewrite_acc"], 75);
  EXPECT_DOUBLE_EQ(outcome.summary["rephrase_acc"], 62.5);
  EXPECT_DOUBLE_EQ(outcome.summary["portability"]["Reasoning_acc"], 75);
  EXPECT_DOUBLE_EQ(outcome.summary["portability"]["Subject_Aliasing_acc"], 0);
  EXPECT_DOUBLE_EQ(outcome.summary["portability_acc"], 37.5);
  // Locality needs the predictions from before the edit.
  EXPECT_TRUE(outcome.summary["locality_acc"].is_null());
  EXPECT_TRUE(outcome.summary["locality"].empty());
  Evaluation before;
  before.cases = {{{"easyedit", outcome.cases[0]}}};
  table[{"l1", "31 km2"}] = tokens({7, 0, 9});  // 2/3 unchanged
  table[{"n1", "Per Aas"}] = tokens({0, 0});    // 0 unchanged, whatever the labels are
  outcome = judge(facts, table, &before);
  EXPECT_NEAR(outcome.summary["locality"]["Relation_Specificity_acc"], 100 * (2.0 / 3 + 1) / 2, 1e-9);
  EXPECT_DOUBLE_EQ(outcome.summary["locality"]["neighborhood_acc"], 0);
  EXPECT_NEAR(outcome.summary["locality_acc"], 100 * (5.0 / 6 + 0) / 2, 1e-9);
}

// What the reader makes of locality_prompt: a probe whose answer is the old one is a neighbourhood prompt too.
TEST(EasyEdit, ANeighbourCountsOnce) {
  datasets::FactSet facts;
  facts.facts = {fact()};
  auto& one = facts.facts[0];
  one.target_true = "Per Aas";
  one.locality["neighborhood"] = {{"n1", {"Per Aas"}}, {"n2", {"Oslo"}}};
  one.neighborhood_prompts = {"n1"};
  std::map<ScoreRequest, Score> table = {{{"Nordhaven is led by", "Iris Vold"}, tokens({1})},
                                         {{"n1", "Per Aas"}, tokens({1, 3})},
                                         {{"n2", "Oslo"}, tokens({4})}};
  Evaluation before;
  before.cases = {{{"easyedit", judge(facts, table).cases[0]}}};
  table[{"n1", "Per Aas"}] = tokens({1, 0});
  EXPECT_DOUBLE_EQ(judge(facts, table, &before).summary["locality_acc"], 75) << "of 1/2 and 1";
}

TEST(EasyEdit, AbsentPromptsGiveNull) {
  datasets::FactSet facts;
  facts.facts = {fact()};
  const auto outcome = judge(facts, {{{"Nordhaven is led by", "Iris Vold"}, tokens({1})}});
  EXPECT_DOUBLE_EQ(outcome.summary["rewrite_acc"], 100);
  EXPECT_TRUE(outcome.summary["rephrase_acc"].is_null());
  EXPECT_TRUE(outcome.summary["portability_acc"].is_null());
}

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
  EXPECT_TRUE(make_metric("zsre")->suits(facts));
  const std::map<std::string, Score> table = {
      {"Where did Ann study?", {{1, 2, 3}, {1, 2, 9}, {0, 0, 0}}},                 // 2/3
      {"Ann studied where?", {{1, 2, 3}, {9, 9, 3}, {0, 0, 0}}},                   // 1/3
      {"nq question: who wrote it?", {{4, 5, 6, 7}, {4, 5, 6, 9}, {0, 0, 0, 0}}},  // 3/4; the question mark is added
      {"Where did Bob study?", {{1, 2, 3}, {1, 2, 3}, {0, 0, 0}}},                 // 1
      {"Bob studied where?", {{1, 2, 3}, {1, 2, 3}, {0, 0, 0}}},
  };
  const auto outcome =
      testing::judged("zsre", facts, [&](const ScoreRequest& request) { return table.at(request.prompt); });
  const auto& summary = outcome.summary;
  EXPECT_NEAR(summary["efficacy_accuracy"], 100 * (2.0 / 3 + 1) / 2, 1e-9);
  EXPECT_NEAR(summary["paraphrase_accuracy"], 100 * (1.0 / 3 + 1) / 2, 1e-9);
  EXPECT_NEAR(summary["neighborhood_accuracy"], 75, 1e-9);
  EXPECT_EQ(summary["counts"]["neighborhood_accuracy"], 1);
  EXPECT_NEAR(summary["score"], 3 / (6 / 500.0 + 3 / 200.0 + 1 / 75.0), 1e-9);
  EXPECT_EQ(outcome.cases[0]["rewrite_prompts_correct"], nlohmann::json({true, true, false}));
  EXPECT_EQ(outcome.cases[1]["neighborhood_prompts_correct"], nlohmann::json::array());
}

TEST(Mquake, ComputesEveryFigureAsDefined) {
  datasets::FactSet facts;
  facts.format = "mquake";
  facts.facts = {fact(), fact()};
  facts.facts[1].subject = "Suddale";
  datasets::FactGroup group;
  group.kind = "mquake";
  group.facts = {0, 1};
  group.questions = {"Q1?", "Q2?"};
  group.answers = {"Moss"};
  group.new_answers = {"Alta", "Alta town"};
  group.new_single_hops = {{"?", "Nordhaven is led by", {"Iris Vold"}}, {"?", "Iris Vold lives in", {"Alta"}}};
  facts.groups = {group};
  EXPECT_TRUE(make_metric("mquake")->suits(facts));
  // `right` answers by the last line of the prompt and the target.
  const auto judged = [&](const std::set<std::pair<std::string, std::string>>& right) {
    return testing::judged("mquake", facts, [&](const ScoreRequest& request) {
      std::string last = request.prompt;
      if (last.ends_with("\nA:")) last.resize(last.size() - 3);
      last = last.substr(last.rfind('\n') + 1);
      return tokens({right.count({last, request.target}) ? 1 : 0});
    });
  };
  auto outcome =
      judged({{"Nordhaven is led by", "Iris Vold"}, {"Iris Vold lives in", "Alta\n"}, {"Q: Q2?", "Alta town\n"}});
  EXPECT_DOUBLE_EQ(outcome.summary["edit_wise"], 50);
  EXPECT_DOUBLE_EQ(outcome.summary["instance_wise"], 100);
  EXPECT_DOUBLE_EQ(outcome.summary["multi_hop"], 100);
  EXPECT_DOUBLE_EQ(outcome.summary["multi_hop_old"], 0);
  EXPECT_EQ(outcome.summary["instances"], 1);
  EXPECT_EQ(outcome.groups[0]["questions"], nlohmann::json({false, true}));
  outcome = judged({{"Suddale is led by", "Iris Vold"}, {"Q: Q1?", "Moss\n"}});
  EXPECT_DOUBLE_EQ(outcome.summary["edit_wise"], 50);
  EXPECT_DOUBLE_EQ(outcome.summary["instance_wise"], 0);
  EXPECT_DOUBLE_EQ(outcome.summary["multi_hop"], 0);
  EXPECT_DOUBLE_EQ(outcome.summary["multi_hop_old"], 100);
  // A hop without a statement is asked with its question, one with neither asks nothing.
  facts.groups[0].new_single_hops = {{"Where does Vold live?", "", {"Alta"}}, {"", " ", {"Alta"}}};
  outcome = judged({{"Q: Where does Vold live?", "Alta\n"}});
  EXPECT_EQ(outcome.groups[0]["hops"], nlohmann::json::array({true}));
}

TEST(Families, NamesResolve) {
  datasets::FactSet facts;
  facts.facts = {fact()};
  EXPECT_EQ(resolve_metrics({"zsre", "zsre", "health"}, facts), (std::vector<std::string>{"zsre", "health"}));
  EXPECT_TRUE(resolve_metrics({"none"}, facts).empty());
  EXPECT_EQ(resolve_metrics({"auto"}, facts), (std::vector<std::string>{"easyedit", "free"}));
  facts.facts[0].target_true = "Per";
  facts.facts[0].neighborhood_prompts = {"n"};
  EXPECT_EQ(resolve_metrics({"auto"}, facts), (std::vector<std::string>{"counterfact", "easyedit"}));
  facts.format = "zsre";
  EXPECT_EQ(resolve_metrics({"auto"}, facts), (std::vector<std::string>{"zsre", "easyedit"}));
  const auto told =
      testing::error_of([&] { (void)resolve_metrics({"counterfacts"}, facts); }, ErrorClass::kInvalidArgument);
  EXPECT_NE(told.find("did you mean \"counterfact\"?"), std::string::npos) << told;
}

TEST(Families, EveryFamilyIsDescribed) {
  ASSERT_GE(metric_families().size(), 6U);
  for (const auto& info : metric_families()) {
    EXPECT_EQ(make_metric(info.name)->info().name, info.name);
    EXPECT_FALSE(info.summary.empty()) << info.name;
    EXPECT_FALSE(info.protocol.empty()) << info.name;
    EXPECT_FALSE(info.fields.empty()) << info.name;
    for (const auto& field : info.fields) {
      EXPECT_FALSE(field.paper_name.empty()) << field.key;
      EXPECT_FALSE(field.unit.empty()) << field.key;
      EXPECT_TRUE(field.definition.ends_with('.') && field.definition.size() > 20) << field.key;
    }
  }
}

TEST(Families, EveryScoringFamilyTakesAnEmptySetAndABareFact) {
  for (const auto& info : metric_families()) {
    if (info.name == "health" || info.name == "generation" || info.name == "free")
      continue;  // these run the model themselves
    for (size_t n : {0, 1}) {
      datasets::FactSet facts;
      facts.facts.assign(n, fact());
      const auto outcome = testing::judged(info.name, facts, [](const ScoreRequest&) { return tokens({1}); });
      EXPECT_EQ(outcome.summary["n"], n) << info.name;
      EXPECT_EQ(outcome.cases.size(), n) << info.name;
      if (n == 0) continue;
      int numbers = 0;
      for (const auto& field : info.fields)
        if (outcome.summary.contains(field.key) && outcome.summary[field.key].is_number()) ++numbers;
      EXPECT_GT(numbers, 0) << info.name;
    }
  }
}

TEST(Retention, RoundTripsAndCountsEditedFactsOnly) {
  RetentionMatrix matrix;
  const Efficacy good{0.1, 2.0, true, 0.9}, bad{3.0, 1.0, false, 0.05};
  matrix.add(1, {good, bad, bad});
  matrix.add(3, {bad, good, good});
  const auto json = matrix.to_json();
  EXPECT_EQ(json["success"], nlohmann::json({{1, 0, 0}, {0, 1, 1}}));
  EXPECT_DOUBLE_EQ(json["edited_success"][0], 100);
  EXPECT_NEAR(json["edited_success"][1], 200.0 / 3, 1e-9);
  EXPECT_EQ(RetentionMatrix::from_json(json).to_json()["success"], json["success"]);
  EXPECT_THROW(matrix.add(4, {good}), Error);
  // Facts without an old answer are left out, as in the final figure; where none has one, it is accuracy.
  RetentionMatrix mixed, alone;
  const Efficacy said{0.1, {}, true, 0.9}, unsaid{3.0, {}, false, 0.05};
  mixed.add(1, {said, bad, good});
  mixed.add(3, {said, bad, good});
  alone.add(2, {said, unsaid});
  EXPECT_EQ(mixed.to_json()["edited_success"], nlohmann::json({nullptr, 50.0}));
  EXPECT_EQ(alone.to_json()["edited_success"], nlohmann::json({50.0}));
  EXPECT_THROW((void)RetentionMatrix::from_json({{"edits_applied", {1}}}), Error);
}

}  // namespace metrics_easyedit_test
}  // namespace emend::evaluation
