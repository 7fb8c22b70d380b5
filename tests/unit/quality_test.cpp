// The table of several runs: its figures are the runs' own, and what failed is a row.
#include <emend/core/error.h>
#include <emend/evaluation/statistics.h>
#include <emend/workflow/variants.h>
#include <gtest/gtest.h>

#include "support/error_of.h"
#include "support/sample_comparison.h"
#include "support/temporary_folder.h"

namespace emend::evaluation {
namespace quality_test {

using nlohmann::json;

class Quality : public ::testing::Test {
 protected:
  [[nodiscard]] json document(bool lifelong = false) const {
    return quality_document(testing::sample_comparison(folder_.path(), lifelong));
  }
  static const json& row(const json& document, const std::string& name) {
    for (const auto& one : document["rows"])
      if (one["name"] == name) return one;
    throw std::out_of_range(name);
  }
  testing::TemporaryFolder folder_{"quality"};
};

TEST_F(Quality, FiguresAreThoseOfTheRuns) {
  const json table = document();
  const auto names = [&] {
    std::vector<std::string> all;
    for (const auto& one : table["rows"]) all.push_back(one["name"]);
    return all;
  }();
  EXPECT_EQ(names, (std::vector<std::string>{"unedited", "told (retrieval)", "memit, seed 0", "memit, seed 1",
                                             "memit, mean of 2 seeds", "latch, seed 0", "latch, seed 1",
                                             "latch, mean of 2 seeds", "ft: lr=1", "rome"}));
  for (const char* run : {"memit0", "memit1", "latch0", "latch1"}) {
    const RunReport own = load_run(folder_.path() / run);
    const json& figures = row(table, std::string(run).substr(0, 5) + ", seed " + run[5])["figures"];
    size_t compared = 0;
    for (const auto& column : table["columns"]) {
      const std::string key = column["key"], family = key.substr(0, key.find('.'));
      if (!own.results["metrics"].contains(family)) continue;
      const json& post = own.results["metrics"][family]["post"];
      const std::string name = key.substr(key.find('.') + 1);
      EXPECT_EQ(figures[key]["value"], post[name]) << key;
      EXPECT_EQ(figures[key]["ci95"],
                post.contains(name + "_ci95") ? post[name + "_ci95"] : post["ci95"].value(name, json()))
          << key;
      ++compared;
    }
    EXPECT_EQ(compared, 11U) << "four of free, the score and its three parts, three of easyedit";
    EXPECT_DOUBLE_EQ(figures["seconds"]["value"], (31.5 + 4.2) / 40);
  }
  EXPECT_EQ(row(table, "unedited")["figures"]["free.edit_begins"]["value"], 10);
  EXPECT_EQ(row(table, "told (retrieval)")["figures"]["free.edit_begins"]["value"], 70);
  EXPECT_FALSE(row(table, "told (retrieval)")["figures"].contains("counterfact.score"));
}

TEST_F(Quality, DifferencesArePairedWithTheFirstRun) {
  const json table = document();
  const auto comparison = compare_runs(load_run(folder_.path() / "memit0"), load_run(folder_.path() / "latch1"));
  const json& figures = row(table, "latch, seed 1")["figures"];
  size_t found = 0;
  for (const auto& one : comparison["differences"]) {
    const std::string key = one["family"].get<std::string>() + "." + one["metric"].get<std::string>();
    if (!figures.contains(key)) continue;
    EXPECT_EQ(figures[key]["difference"], one["difference"]) << key;
    EXPECT_EQ(figures[key]["differs"], one["significant"]) << key;
    ++found;
  }
  EXPECT_EQ(found, 7U) << "the cases of made-up runs have no texts";
  EXPECT_FALSE(row(table, "memit, seed 0")["figures"]["counterfact.score"].contains("difference"));
}

// Protocols without a score: their shares are columns, by the papers' names; one that two families use has theirs.
TEST_F(Quality, FamiliesWithoutAScoreHaveColumns) {
  const auto heads = [&](const json& metrics) {
    RunReport run;
    run.results = {{"schema", 1}, {"editor", "memit"}, {"metrics", json::object()}};
    for (const auto& [family, figures] : metrics.items()) run.results["metrics"][family]["post"] = figures;
    testing::write_sample(folder_.path() / "own", run);
    const json table = quality_document({QualityEntry{"memit", "memit", folder_.path() / "own"}});
    std::vector<std::string> all;
    for (const auto& column : table["columns"])
      if (column["key"] != "seconds") all.push_back(column["head"]);
    return all;
  };
  const json easyedit = {{"rewrite_acc", 90.0}, {"rephrase_acc", 70.0}, {"locality_acc", nullptr}, {"fluency", 500.0}};
  EXPECT_EQ(heads({{"easyedit", easyedit}}), (std::vector<std::string>{"Reliability", "Generalization"}));
  EXPECT_EQ(heads({{"mquake", {{"edit_wise", 90.0}, {"instance_wise", 40.0}, {"multi_hop", 9.0}, {"instances", 3}}}}),
            (std::vector<std::string>{"Edit-wise", "Instance-wise", "Multi-hop"}));
  EXPECT_EQ(heads({{"zsre", {{"paraphrase_accuracy", 80.0}}}, {"easyedit", easyedit}}),
            (std::vector<std::string>{"zsre: Generalization", "Reliability", "easyedit: Generalization"}));
}

TEST_F(Quality, MeansOverSeedsHaveTheirRange) {
  const json table = document();
  const json& mean = row(table, "latch, mean of 2 seeds")["figures"]["free.edit_begins"];
  EXPECT_EQ(mean["value"], 95.5);
  EXPECT_EQ(mean["range"], json({95.0, 96.0}));
  EXPECT_FALSE(mean.contains("ci95"));
}

TEST_F(Quality, WhatHasNoFiguresSaysWhy) {
  const json table = document();
  EXPECT_EQ(row(table, "ft: lr=1")["state"], "failed");
  EXPECT_EQ(row(table, "rome")["state"], "pending");
  const std::string text = quality_table(table);
  EXPECT_NE(text.find("| ft: lr=1 | failed | – |"), std::string::npos) << text;
  EXPECT_NE(text.find("- ft: lr=1: failed: layer 3: not \\| finite\n"), std::string::npos) << text;
  EXPECT_NE(text.find("| latch, seed 1 | 96.0 (88–97) | 86.0 (76–94) | 24.0 (15–32) | 0.0960 |"), std::string::npos)
      << text;
  EXPECT_NE(text.find("| latch, mean of 2 seeds | 95.5 (95.0–96.0) |"), std::string::npos) << text;
  // Every row has the columns of the head.
  std::istringstream lines(text);
  size_t columns = 0;
  for (std::string line; std::getline(lines, line) && line.starts_with("|");) {
    size_t bars = 0;
    for (size_t i = 0; i < line.size(); ++i) bars += line[i] == '|' && (i == 0 || line[i - 1] != '\\');
    if (columns == 0) columns = bars;
    EXPECT_EQ(bars, columns) << line;
  }
}

TEST_F(Quality, RunsOfOtherFactsAreRefused) {
  auto entries = testing::sample_comparison(folder_.path(), false);
  auto other = testing::sample_run(40);
  other.results["facts_file"] = {{"fingerprint", "another"}};
  testing::write_sample(folder_.path() / "latch0", other);
  const auto told = testing::error_of([&] { (void)quality_document(entries); }, ErrorClass::kInvalidArgument);
  EXPECT_NE(told.find("latch0/results.json: facts_file.fingerprint is \"another\""), std::string::npos) << told;
}

TEST_F(Quality, SequencesKeepTheirCurvesAndSayWhereTheyCollapse) {
  const json table = document(true);
  const json& memit = row(table, "memit, seed 0");
  EXPECT_EQ(memit["lifelong"], load_run(folder_.path() / "memit0").results["lifelong"]);
  // 100, 87, 74, 61 percent of the first facts; LAMBADA 30, 25.7, 21.3, 17.
  EXPECT_EQ(memit["collapse"]["edits"], 150);
  EXPECT_EQ(memit["collapse"]["why"], "of the first facts 74.0 % hold; LAMBADA 21.3, was 30.0");
  EXPECT_TRUE(row(table, "latch, seed 0")["collapse"]["edits"].is_null());
  const json& last = memit["last"];
  EXPECT_EQ(last["first"]["value"], 61.0);
  const auto range = share_interval(0.61, 100);
  EXPECT_NEAR(last["first"]["ci95"][0], 100 * range.first, 1e-9);
  EXPECT_NEAR(last["first"]["ci95"][1], 100 * range.second, 1e-9);
  EXPECT_NEAR(last["all"]["ci95"][0], 100 * share_interval(0.61, 200).first, 1e-9) << "of all 200";
  EXPECT_DOUBLE_EQ(last["seconds"]["value"], 1.1) << "a fact";
  EXPECT_FALSE(last.contains("neighborhood")) << "not measured";
  const json& counted = row(table, "latch, seed 0")["last"];
  EXPECT_NEAR(counted["all"]["ci95"][0], 100 * share_interval(0.96, 150).first, 1e-9) << "of those that were asked";
  const std::string text = quality_table(table);
  EXPECT_NE(text.find("| 200 | 61.0 | 61.0 | 96.0 | 96.0 |"), std::string::npos) << text;
  EXPECT_NE(text.find("| not by 200 |"), std::string::npos) << text;
  EXPECT_NE(text.find("- memit, seed 0: 1 fact of 40 not written; collapses at 150 edits: "), std::string::npos)
      << text;
}

// The rule at its borders: exactly 80 % and exactly four fifths are no collapse.
TEST(CollapsePoint, IsTheFirstMeasurementBelow) {
  const auto entry = [](int edits, double first, json lambada) {
    return json{{"edits", edits}, {"first", first}, {"health", {{"lambada", std::move(lambada)}}}};
  };
  const json held = {entry(10, 100, 30.0), entry(20, 80, 24.0), entry(30, 79.9, 24.0)};
  EXPECT_EQ(collapse_point(held, nullptr)["edits"], 30);
  EXPECT_EQ(collapse_point(held, 31.0)["edits"], 20) << "the unedited model's LAMBADA counts where it is known";
  EXPECT_TRUE(collapse_point({entry(10, 100, nullptr), entry(20, 90, nullptr)}, nullptr)["edits"].is_null());
  EXPECT_TRUE(collapse_point(json::array(), nullptr)["edits"].is_null());
}

TEST(Variants, AreReadAsTheyAreWritten) {
  const auto read = [](const std::vector<std::string>& texts, const std::vector<int64_t>& seeds = {}) {
    return workflow::parse_variants(texts, seeds, 7);
  };
  const auto one = read({"memit,latch,memit: layers=[1,2] v_lr=0.2, clamp_norm_factor=0.4", "ROME: hparams=a/b.yaml"});
  ASSERT_EQ(one.size(), 4U);
  EXPECT_EQ(one[0].name, "memit");
  EXPECT_EQ(one[0].seed, 7U);
  EXPECT_EQ(one[2].set, (std::vector<std::string>{"layers=[1,2]", "v_lr=0.2", "clamp_norm_factor=0.4"}));
  EXPECT_EQ(one[2].name, "memit: layers=[1,2], v_lr=0.2, clamp_norm_factor=0.4");
  EXPECT_EQ(one[2].folder, "memit-layers=-1-2-v_lr=0.2-clamp_norm_factor=0.4");
  EXPECT_EQ(one[3].hparams, "a/b.yaml");
  EXPECT_EQ(one[3].folder, "rome-hparams=a-b.yaml");
  const auto seeded = read({"memit", "rome"}, {0, 3});
  ASSERT_EQ(seeded.size(), 4U);
  EXPECT_EQ(seeded[1].name, "memit, seed 3");
  EXPECT_EQ(seeded[1].group, "memit");
  EXPECT_EQ(seeded[1].seed, 3U);
  const auto alike = read({"memit: v_lr=1", "memit: v_lr=1 layers=[1]", "memit: v_lr=1 layers=1"});
  EXPECT_NE(alike[1].folder, alike[2].folder);
  for (const char* wrong :
       {"", ",", "memit,,rome", "memit, ", ",rome", "memit: v_lr=1,,rome", ": v_lr=1", "memmit", "memit rome",
        "memit: v_lr", "memit: =1", "memit,memit", "memit: a=1 b=2,memit: b=2 a=1", "v_lr=1"}) {
    SCOPED_TRACE(wrong);
    testing::error_of([&] { (void)read({wrong}); }, ErrorClass::kInvalidArgument);
  }
}

}  // namespace quality_test
}  // namespace emend::evaluation
