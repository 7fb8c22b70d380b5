#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/datasets/convert.h>
#include <gtest/gtest.h>

#include "support/temporary_folder.h"

namespace emend::datasets {
namespace facts_convert_test {

Fact full_fact() {
  Fact fact;
  fact.case_id = 12;
  fact.prompt = "{} was founded in";
  fact.subject = "Orvell Motors";
  fact.target_new = "Lisbon";
  fact.target_true = "Turin";
  fact.target_true_aliases = {"Torino"};
  fact.relation_id = "P740";
  fact.paraphrase_prompts = {"Orvell Motors started in", "The home of Orvell Motors is"};
  fact.neighborhood_prompts = {"Bramante Auto was founded in", "Fiat was founded in"};
  fact.attribute_prompts = {"Tagus Works was founded in"};
  fact.generation_prompts = {"Orvell Motors makes"};
  fact.distracting_prompts = {"Orvell Motors was founded in Lisbon. Fiat was founded in"};
  fact.locality["Forgetfulness"] = {{"It also makes", {"vans", "lorries"}}};
  fact.portability["Reasoning"] = {{"Its country is", {"Portugal"}}};
  fact.extra = {{"note", {1, 2}}, {"alt_text", "é"}};
  return fact;
}

TEST(FactsConvert, TheShortFormHoldsEverything) {
  const std::vector<Fact> facts = {full_fact()};
  EXPECT_TRUE(conversion_losses(facts, "jsonl").empty()) << conversion_losses(facts, "jsonl").front();
  const FactSet again = parse_facts(format_facts(facts, "jsonl"), "again");
  EXPECT_EQ(again.fingerprint, fingerprint(facts));
}

TEST(FactsConvert, LossesAreNamed) {
  const std::vector<Fact> facts = {full_fact()};
  const auto lost = [&](const std::string& format) {
    std::string list;
    for (const std::string& name : conversion_losses(facts, format)) list += name.substr(0, name.find(' ')) + " ";
    return list;
  };
  EXPECT_EQ(lost("counterfact"), "locality portability target_true_aliases ");
  EXPECT_EQ(
      lost("fastedit"),
      "attribute_prompts case_id distracting_neighborhood_prompts generation_prompts locality neighborhood_prompts "
      "portability relation_id target_true target_true_aliases ");
}

TEST(FactsConvert, OneSettingReadsAMixedSetBack) {
  Fact open = full_fact();
  open.target_true.reset();
  open.target_true_aliases.clear();
  open.extra["answers"] = {"Turin"};
  for (const auto& facts : {std::vector<Fact>{full_fact(), open}, std::vector<Fact>{open, full_fact()}}) {
    const FactSet again = parse_facts(format_facts(facts, "zsre"), "again", {.zsre_target = "alt"});
    ASSERT_EQ(again.facts.size(), 2U);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(again.facts[i].target_new, "Lisbon");
      EXPECT_EQ(again.facts[i].target_true, facts[i].target_true);
    }
  }
  EXPECT_EQ(parse_facts(format_facts({open}, "zsre"), "again").facts.at(0).target_new, "Lisbon");
}

TEST(FactsConvert, KeysOfTheirOwnAreMissedToo) {
  Fact fact = full_fact();
  fact.extra["target_new_id"] = "Q597";
  EXPECT_TRUE(conversion_losses({fact}, "easyedit").size() > 0);
  fact = parse_facts(R"({"text": "About A. A is", "concept": "A", "labels": ["b c", "d e"]})", "f").facts.at(0);
  EXPECT_TRUE(conversion_losses({fact}, "knowedit").empty());
  EXPECT_EQ(format_facts({fact}, "knowedit"),
            "[\n{\"text\":\"About A. A is\",\"labels\":[\"b c\",\"d e\"],\"concept\":\"A\",\"portability\":{},"
            "\"locality\":{},\"kind\":\"wikibio\"}\n]\n");
}

TEST(FactsConvert, EveryWritableFormatKeepsTheEdit) {
  for (const FormatInfo& format : fact_formats()) {
    if (!format.writable) {
      EXPECT_THROW((void)format_facts({full_fact()}, format.name), Error);
      continue;
    }
    ReadOptions options;
    options.format = format.name;
    options.zsre_target = "alt";
    const FactSet again = parse_facts(format_facts({full_fact(), full_fact()}, format.name), "again", options);
    ASSERT_EQ(again.facts.size(), 2U) << format.name;
    EXPECT_EQ(again.facts[0].prompt, full_fact().prompt) << format.name;
    EXPECT_EQ(again.facts[0].subject, full_fact().subject) << format.name;
    EXPECT_EQ(again.facts[0].target_new, full_fact().target_new) << format.name;
    options.format = "auto";
    EXPECT_EQ(parse_facts(format_facts({full_fact()}, format.name), "again", options).facts[0].target_new,
              full_fact().target_new)
        << format.name << " is recognised";
  }
}

TEST(FactsConvert, SubjectTwiceInThePromptKeepsTheSlot) {
  Fact fact = full_fact();
  fact.subject = "Rome";
  fact.prompt = "Rome is Rome, but {} is in";
  for (const char* format : {"easyedit", "knowedit", "zsre"}) {
    const FactSet again = parse_facts(format_facts({fact}, format), "again", {.format = format, .zsre_target = "alt"});
    EXPECT_EQ(again.facts[0].prompt, fact.prompt) << format;
  }
}

TEST(FactsConvert, FileToFile) {
  const testing::TemporaryFolder folder("facts-convert");
  const auto in = folder / "in.json", out = folder / "out.jsonl";
  write_file(in, format_facts({full_fact()}, "counterfact"));
  const ConvertReport report = convert_facts(in, out, "jsonl");
  EXPECT_EQ(report.facts, 1U);
  EXPECT_EQ(report.from, "counterfact");
  EXPECT_EQ(load_facts(out).fingerprint, load_facts(in).fingerprint);
  EXPECT_THROW(convert_facts(in, out, "mquake"), Error);
  EXPECT_THROW(convert_facts(in, out, "jsonll"), Error);
}

}  // namespace facts_convert_test
}  // namespace emend::datasets
