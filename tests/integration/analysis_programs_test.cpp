// lint, convert facts, trace and suggest as a user meets them.
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/models/model.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "support/known_facts.h"
#include "support/program_fixture.h"
#include "support/tiny_model.h"

namespace emend::testing {
namespace analysis_programs_test {

using nlohmann::json;

class AnalysisPrograms : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    write_file(folder_ / "facts.jsonl",
               "{\"prompt\": \"{} is in the city of\", \"subject\": \"The  Eiffel Tower\", \"target_new\": \"Rome\"}\n"
               "{\"prompt\": \"The capital of {} is\", \"subject\": \"France\", \"target_new\": \"Oslo\", "
               "\"target_true\": \"Paris\"}\n"
               "{\"prompt\": \"The capital of {} is\", \"subject\": \"France\", \"target_new\": \"Lima\"}\n"
               "{\"prompt\": \"Nothing here\", \"subject\": \"Spain\", \"target_new\": \"Lima\"}\n");
    write_file(folder_ / "good.jsonl",
               "{\"prompt\": \"The capital of {} is\", \"subject\": \"France\", \"target_new\": \"Oslo\", "
               "\"target_true\": \"Paris\"}\n");
  }
};

TEST_F(AnalysisPrograms, LintNamesLinesAndItsStatusIsForScripts) {
  const auto result = run_program("emend", {"lint", path("facts.jsonl"), "--json"});
  EXPECT_EQ(result.status, 3) << result.err;
  const json document = json::parse(result.out);
  EXPECT_EQ(document["facts"], 3);
  EXPECT_EQ(document["errors"], 2);
  std::map<std::string, int64_t> lines;
  for (const auto& finding : document["findings"])
    lines[finding["check"].get<std::string>()] = finding["line"].get<int64_t>();
  EXPECT_EQ(lines.at("whitespace"), 1);
  EXPECT_EQ(lines.at("contradiction"), 3);
  EXPECT_EQ(lines.at("unusable-row"), 4);
  const auto text = run_program("emend", {"lint", path("facts.jsonl")});
  EXPECT_NE(text.out.find("facts.jsonl:4: error:"), std::string::npos) << text.out;
  must_run("emend", {"lint", path("good.jsonl")});
  EXPECT_EQ(run_program("emend", {"lint", path("absent.jsonl")}).status, 3);
  EXPECT_EQ(run_program("emend", {"lint", path("good.jsonl"), "--out", path("x")}).status, 2) << "--out needs --fix";
  write_file(folder_ / "blank.jsonl", R"({"prompt": "{} is", "subject": "A", "target_new": ""})");
  const auto blank = run_program("emend", {"lint", path("blank.jsonl")});
  EXPECT_EQ(blank.status, 3) << blank.out;
  EXPECT_NE(blank.out.find("no usable fact in 1 row [no-facts]"), std::string::npos) << blank.out;
}

TEST_F(AnalysisPrograms, LintFixesWhatIsClearAndLosesNothing) {
  const std::string original = read_file(folder_ / "facts.jsonl");
  auto result = run_program("emend", {"lint", path("facts.jsonl"), "--fix"});
  EXPECT_EQ(result.status, 3) << "errors are left";
  const std::string mended = read_file(folder_ / "facts.jsonl");
  EXPECT_NE(mended, original);
  EXPECT_EQ(mended.substr(mended.find('\n')), original.substr(original.find('\n'))) << "the rest as it is";
  write_file(folder_ / "facts.jsonl", original);
  result = run_program("emend", {"lint", path("facts.jsonl"), "--fix", "--out", path("fixed.jsonl"), "--json"});
  EXPECT_EQ(result.status, 3) << "errors are left";
  EXPECT_GE(json::parse(result.out)["fixed"].get<int>(), 1);
  const std::string fixed = read_file(folder_ / "fixed.jsonl");
  EXPECT_NE(fixed.find("\"The Eiffel Tower\""), std::string::npos) << fixed;
  write_file(folder_ / "small.jsonl",
             "{\"prompt\": \"{} is in\", \"subject\": \"The  Louvre\", \"target_new\": \"Rome\", \"mine\": 7}\n");
  result = must_run("emend", {"lint", path("small.jsonl"), "--fix"});
  EXPECT_EQ(json::parse(read_file(folder_ / "small.jsonl"))["subject"], "The Louvre");
  EXPECT_EQ(json::parse(read_file(folder_ / "small.jsonl"))["mine"], 7) << "other keys stay";
}

TEST_F(AnalysisPrograms, ConvertFactsIsAVerbOfTwoWords) {
  auto result =
      must_run("emend", {"convert", "facts", path("good.jsonl"), path("cf.json"), "--to", "counterfact", "--json"});
  EXPECT_EQ(json::parse(result.out)["facts"], 1);
  EXPECT_EQ(json::parse(read_file(folder_ / "cf.json"))[0]["requested_rewrite"]["target_true"]["str"], "Paris");
  result = must_run("emend", {"convert-facts", path("cf.json"), path("again.jsonl"), "--to", "jsonl"});
  EXPECT_EQ(json::parse(read_file(folder_ / "again.jsonl"))["target_new"], "Oslo");
  result = run_program("emend", {"convert", "facts", path("cf.json"), path("again.jsonl"), "--to", "jsonl"});
  EXPECT_EQ(result.status, 2) << "the file exists";
  EXPECT_NE(result.err.find("--force"), std::string::npos) << result.err;
  EXPECT_EQ(run_program("emend", {"convert", "facts", path("cf.json"), path("y"), "--to", "nothing"}).status, 2);
  result = must_run("emend", {"convert", "facts", path("cf.json"), path("new/folder/z.json"), "--to", "zsre"});
  EXPECT_NE(result.out.find("--zsre-target alt"), std::string::npos) << result.out;
  result = must_run("emend", {"convert", "facts", path("new/folder/z.json"), path("back.jsonl"), "--to", "jsonl",
                              "--zsre-target", "alt"});
  EXPECT_EQ(json::parse(read_file(folder_ / "back.jsonl"))["target_new"], "Oslo");
}

TEST_F(AnalysisPrograms, TraceWritesHeatMaps) {
  const auto result =
      must_run("emend", {"trace", "--model", path("model/"), "--prompt", "The capital of {} is", "--subject", "France",
                         "--out", path("trace"), "--samples", "4", "--dtype", "float32", "--json"});
  const json document = json::parse(result.out);
  EXPECT_EQ(document["facts"], 1);
  EXPECT_EQ(document["traces"][0]["prompt"], "The capital of France is");
  EXPECT_EQ(document["effect"].size(), 3U);
  EXPECT_EQ(json::parse(read_file(folder_ / "trace" / "trace.json"))["traces"], document["traces"]);
  const std::string page = read_file(folder_ / "trace" / "trace.html");
  const std::string begin = "id=\"data\">";
  const size_t from = page.find(begin) + begin.size();
  const json drawn = json::parse(page.substr(from, page.find("</script>", from) - from));
  EXPECT_EQ(drawn["suggested"]["layers"], document["suggested"]["layers"]);
  EXPECT_EQ(drawn["effect"], document["effect"]);
  EXPECT_EQ(drawn["model"], "model");
  EXPECT_EQ(page.find("https://"), std::string::npos) << "no name from outside";
  auto wrong = run_program("emend", {"trace", "--model", path("model"), "--prompt", "The capital of {} is"});
  EXPECT_EQ(wrong.status, 2);
  EXPECT_NE(wrong.err.find("--subject"), std::string::npos) << wrong.err;
  wrong = run_program("emend", {"trace", "--model", path("model"), "--prompt", "Here", "--subject", "France"});
  EXPECT_EQ(wrong.status, 2) << wrong.err;
}

TEST_F(AnalysisPrograms, TheReportHoldsSpectraAndTakesATrace) {
  auto result = must_run("memit_edit",
                         {"--model", path("model"), "--facts", path("good.jsonl"), "--hparams", path("hparams.yaml"),
                          "--corpus", path("corpus.txt"), "--cache", path("cache"), "--out", path("run")});
  const json extras = json::parse(read_file(folder_ / "run" / "report.json"));
  ASSERT_EQ(extras["layers"].size(), 2U);
  for (const auto& layer : extras["layers"]) {
    const double norm = layer["update_norm"].get<double>();
    double squares = 0;
    for (const auto& value : layer["spectrum"]) squares += value.get<double>() * value.get<double>();
    EXPECT_NEAR(std::sqrt(squares), norm, 1e-6 * norm) << "one fact: the spectrum holds all of the update";
    EXPECT_NEAR(layer["relative"].get<double>(), norm / layer["weight_norm"].get<double>(), 1e-9);
  }
  EXPECT_GT(extras["memory"]["cpu"]["weights"].get<int64_t>(), 39232 * 4 / 2);
  EXPECT_FALSE(extras["machine"]["devices"].get<std::string>().empty());
  result = must_run("emend", {"trace", "--model", path("model"), "--prompt", "The capital of {} is", "--subject",
                              "France", "--out", path("trace"), "--samples", "2"});
  const json suggested = json::parse(read_file(folder_ / "trace" / "trace.json"))["suggested"];
  EXPECT_NE(result.out.find("layers to edit: " + suggested["layers"].dump() + "\n" +
                            suggested["caveat"].get<std::string>() + "\n"),
            std::string::npos)
      << result.out;
  EXPECT_NE(suggested["caveat"], "") << "of one fact";
  result = must_run("emend", {"report", path("run"), "--trace", path("trace/trace.json")});
  const auto effect = json::parse(read_file(folder_ / "trace" / "trace.json"))["effect"];
  EXPECT_NE(read_file(folder_ / "run" / "report.html").find("\"trace\":{\"clean\":"), std::string::npos);
  EXPECT_NE(read_file(folder_ / "run" / "report.html").find("\"effect\":" + effect.dump()), std::string::npos);
  EXPECT_EQ(run_program("emend", {"report", path("run"), "--trace", path("run/results.json")}).status, 3);
}

TEST_F(AnalysisPrograms, WhatIsNoRunIsNotReportedOrCompared) {
  std::filesystem::create_directories(folder_ / "run");
  write_file(folder_ / "run" / "report.html", "the old one");
  const auto refused = [&](const std::string& results, const char* what) {
    write_file(folder_ / "run" / "results.json", results);
    for (const auto& words : {std::vector{std::string("report"), path("run")}, {"compare", path("run"), path("run")}}) {
      const auto result = run_program("emend", words);
      EXPECT_EQ(result.status, 3) << result.out;
      EXPECT_NE(result.err.find(what), std::string::npos) << result.err;
    }
    EXPECT_EQ(read_file(folder_ / "run" / "report.html"), "the old one");
  };
  refused("{}", "results.json: no results of a run");
  refused(R"({"schema": 1, "facts": 2})", "cases.jsonl: no cases");
  write_file(folder_ / "run" / "results.json", R"({"schema": 1, "tune": {}})");
  EXPECT_EQ(run_program("emend", {"report", path("run")}).status, 0) << "of a tuned model";
  const auto tuned = run_program("emend", {"compare", path("run"), path("run")});
  EXPECT_EQ(tuned.status, 2) << tuned.out;
  EXPECT_NE(tuned.err.find("a run without cases"), std::string::npos) << tuned.err;
}

TEST_F(AnalysisPrograms, SuggestSaysWhenTheModelKnowsNothing) {
  const auto result = run_program("emend", {"suggest", "--model", path("model"), "--facts", path("good.jsonl")});
  EXPECT_EQ(result.status, 2) << result.out;
  EXPECT_NE(result.err.find("knows none"), std::string::npos) << result.err;
  const auto nought = run_program("emend", {"trace", "--model", path("nothing"), "--limit", "0"});
  EXPECT_EQ(nought.status, 2) << nought.out;
  EXPECT_NE(nought.err.find("--limit: 0; expected 1 or more, or -1 for all"), std::string::npos) << nought.err;
}

TEST_F(AnalysisPrograms, SuggestWritesAFileThatMemitEditTakes) {
  write_known_facts(folder_);
  must_run("emend", {"suggest", "--model", path("model/"), "--facts", path("known.json"), "--dtype", "float32",
                     "--layers", "2", "--out", path("suggested.yaml")});
  EXPECT_TRUE(read_file(folder_ / "suggested.yaml").starts_with("# Suggested by emend for model.\n"));
  must_run("memit_edit",
           {"--model", path("model"), "--facts", path("good.jsonl"), "--hparams", path("suggested.yaml"), "--dry-run"});
}

}  // namespace analysis_programs_test
}  // namespace emend::testing
