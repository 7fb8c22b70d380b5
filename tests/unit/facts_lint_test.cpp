#include <emend/datasets/lint.h>
#include <gtest/gtest.h>

#include <set>

#include "support/error_of.h"

namespace emend::datasets {
namespace facts_lint_test {

nlohmann::json row(const std::string& prompt, const std::string& subject, const std::string& target,
                   const nlohmann::json& more = nlohmann::json::object()) {
  nlohmann::json value = {{"prompt", prompt}, {"subject", subject}, {"target_new", target}};
  value.update(more);
  return value;
}

FactSet facts(const std::vector<nlohmann::json>& rows) {
  std::string text;
  for (const auto& value : rows) text += value.dump() + "\n";
  return parse_facts(text, "f.jsonl", {.bad_rows = BadRowPolicy::kSkip, .allow_empty = true});
}

/// "check@line" of every finding.
std::multiset<std::string> found(const std::vector<nlohmann::json>& rows) {
  std::multiset<std::string> result;
  for (const Finding& finding : lint_facts(facts(rows))) {
    EXPECT_FALSE(finding.text.empty());
    EXPECT_EQ(finding.text.find('\n'), finding.text.npos) << "on one line: " << finding.text;
    result.insert(finding.check + "@" + finding.where.substr(finding.where.rfind(':') + 1));
  }
  return result;
}

using Names = std::multiset<std::string>;

TEST(FactsLint, GoodFactsHaveNoFindings) {
  EXPECT_EQ(found({row("{} is in the city of", "The Eiffel Tower", "Rome",
                       {{"target_true", "Paris"},
                        {"neighborhood_prompts", {"The Louvre is in"}},
                        {"paraphrase_prompts", {"The Eiffel Tower stands in"}}}),
                   row("{} plays the sport of", "LeBron James", "football", {{"target_true", "basketball"}}),
                   row("The capital of {} is", "France", "Lyon")}),
            Names{});
}

TEST(FactsLint, EachCheckFires) {
  EXPECT_EQ(found({row("{}  is in", "A", "b")}), Names{"whitespace@1"});
  EXPECT_EQ(found({row("{} is in", "A", "b", {{"case_id", 7}}), row("{} is in", "B", "c", {{"case_id", 7}})}),
            Names{"repeated-case-id@2"});
  EXPECT_EQ(found({row("{} is in ", "A", "b")}), Names{"whitespace@1"});
  EXPECT_EQ(found({row("{} is\u00a0in", "A", "b")}), Names{"whitespace@1"});
  EXPECT_EQ(found({row("{} is\nin", "A", "b")}), Names{"whitespace@1"});
  EXPECT_EQ(found({row("{} is in", "A\u200b", "b")}), Names{"invisible-characters@1"});
  EXPECT_EQ(found({row("{}", "A", "b")}), Names{"prompt-is-subject@1"});
  EXPECT_EQ(found({row("{}s are in", "A", "b")}), Names{"subject-glued@1"});
  EXPECT_EQ(found({row("the{} is in", "A", "b")}), Names{"subject-glued@1"});
  EXPECT_EQ(found({row("{}'s home is", "A", "b")}), Names{}) << "a possessive is ordinary English";
  EXPECT_EQ(found({row("{} is", "Rome", "rome")}), Names{"target-is-subject@1"});
  EXPECT_EQ(found({row("In Rome, {} is in", "A", "Rome")}), Names{"target-in-prompt@1"});
  EXPECT_EQ(found({row("The Romeo {} is in", "A", "Rome")}), Names{}) << "whole words only";
  EXPECT_EQ(found({row("在京都的{}位于", "金阁寺", "京都")}), Names{"target-in-prompt@1"}) << "no spaces between words";
  EXPECT_EQ(found({row("— Осло, где {} стоит", "Дом", "Осло")}), Names{"target-in-prompt@1"});
  EXPECT_EQ(found({row("В Ословии {} стоит", "Дом", "Осло")}), Names{});
  EXPECT_EQ(found({row("{}의 수도는", "프랑스", "리옹")}), Names{}) << "a particle";
  EXPECT_EQ(found({row("у{} есть", "Анна", "дом")}), Names{"subject-glued@1"});
  EXPECT_EQ(found({row("{} is in", "A", "Paris.", {{"target_true", "paris"}})}), Names{"target-unchanged@1"});
  EXPECT_EQ(found({row("{} leads", "A", "Jill Biden", {{"target_true", "Joe Biden"}})}), Names{"shared-ending@1"});
  std::string long_answer;
  for (int i = 0; i < 25; ++i) long_answer += "word" + std::to_string(i) + " ";
  EXPECT_EQ(found({row("{} says", "A", long_answer)}), Names{"long-target@1"});
  EXPECT_EQ(found({row("{} is in", "A", "b", {{"neighborhood_prompts", {"B is in"}}})}), Names{"no-old-answer@1"});
  EXPECT_EQ(found({row("{} is in", "Oslo", "b",
                       {{"target_true", "c"}, {"neighborhood_prompts", {"Oslo is in", "Bergen is in"}}})}),
            Names{"neighbour-is-subject@1"});
  EXPECT_EQ(found({row("{} is in", "A", "b", {{"paraphrase_prompts", {"A is in"}}})}), Names{"repeated-paraphrase@1"});
  EXPECT_EQ(found({row("{} is in", "A", "b", {{"paraphrase_prompts", {"{} lies in"}}})}), Names{"slot-in-probe@1"});
  EXPECT_EQ(found({row("{} is", "A", "b"), row("nothing here", "A", "b")}), Names{"unusable-row@2"});
}

TEST(FactsLint, ConflictsAcrossFacts) {
  EXPECT_EQ(found({row("{} is in", "A", "b"), row("The home of {} is", "B", "c"), row("{} is in", "A", "b")}),
            Names{"duplicate@3"});
  EXPECT_EQ(found({row("The home of {} is", "A", "b"), row("The home of {} is", "A", "c")}),
            (Names{"contradiction@2", "shared-key@2"}));
  EXPECT_EQ(found({row("The home of {} is", "A", "b", {{"relation_id", "P1"}}),
                   row("Home of {}:", "A", "c", {{"relation_id", "P1"}})}),
            Names{"contradiction@2"});
  EXPECT_EQ(found({row("The home of {} is", "A", "b", {{"relation_id", "P1"}}),
                   row("Home of {}:", "A", "b", {{"relation_id", "P1"}})}),
            Names{"same-relation@2"});
  EXPECT_EQ(found({row("{} is in", "A", "b"), row("{} was born in", "A", "c"), row("{} likes", "A", "d")}),
            Names{"shared-key@2"});
  EXPECT_EQ(found({row("{} is in", "A", "b"), row("The age of {} is", "A", "c")}), Names{});
  const auto severity = lint_facts(facts({row("{} is in", "A", "b"), row("{} is in", "A", "c")})).front().severity;
  EXPECT_EQ(severity, Severity::kError);
}

TEST(FactsLint, OneSubjectHoweverItsAccentsWereTyped) {
  EXPECT_EQ(found({row("{} is in", "Caf\u00e9 Central", "Rome"), row("{} is in", "Cafe\u0301 Central", "Oslo")}),
            Names({"contradiction@2"}));
  for (const auto& [one, other] : std::vector<std::pair<const char*, const char*>>{
           {"Москва", "москва"}, {"Straße", "STRASSE"}, {"O'Brien", "O’Brien"}, {"ＡＢ", "AB"}, {"ÉIFFEL", "éiffel"}})
    EXPECT_EQ(found({row("{} is in", one, "Rome"), row("{} is in", other, "Oslo")}), Names({"contradiction@2"})) << one;
}

TEST(FactsLint, NamesControlCharactersAndOverlongTexts) {
  EXPECT_EQ(found({row("{} is in", "The \x1b[31mLouvre", "Rome"), row("{} is in", "Big \u202eBen", "Oslo")}),
            Names({"control-characters@1", "control-characters@2"}));
  const std::string document(1 << 20, 'x');
  for (const auto& bad : {row("{} is in", document, "Rome"), row("{} is in" + document, "Petra", "Rome"),
                          row("{} is in", "Petra", "Rome", {{"paraphrase_prompts", {document}}})})
    EXPECT_EQ(found({bad}), Names({"unusable-row@1"}));
}

TEST(FactsLint, SaysWhatIsLeftOut) {
  EXPECT_EQ(found({row("{} is", "A", "b"), row("{} was", "B", "")}), Names({"blank-target@2"}));
}

TEST(FactsLint, SaysWhatIsNotRead) {
  EXPECT_EQ(found({row("{} is", "", "")}), Names({"unusable-row@1"}));
  EXPECT_EQ(found({row("{} is", "A", "")}), (Names{"blank-target@1", "no-facts@f.jsonl"}));
  EXPECT_EQ(found({row("{} is", "A", "b"), row("{} was", "A", "b", {{"Subject", "B"}}),
                   row("{} is not", "A", "b", {{"Subject", "B"}, {"note", 1}})}),
            (Names{"unread-key@2", "unread-key@3"}));
  const auto findings = lint_facts(facts({row("{} was", "A", "b", {{"Subject", "B"}, {"note", 1}})}));
  EXPECT_EQ(findings.at(0).severity, Severity::kWarning);
  EXPECT_NE(findings.at(0).text.find("did you mean \"subject\"?"), std::string::npos) << findings.at(0).text;
  EXPECT_EQ(findings.at(1).severity, Severity::kNote);
  nlohmann::json list = row("{} was", "A", "b"), other = row("{} will be", "A", "b");
  list["target_new"] = {"b", "c"};
  other["target_new"] = {"b", "d"};
  EXPECT_EQ(found({row("{} is", "A", "b"), list, other}), Names{"target-list@2"}) << "once";
  EXPECT_EQ(found({row("{} is", "A", "[\"b\", \"c\"]"), row("{} was", "C", "[sic] b")}), Names{"target-list@1"});
}

TEST(FactsLint, ConflictsByDesignAreNotes) {
  const std::string edit =
      R"({"relation": {"prompt": "The father of {} is"}, "subject": {"label": "Ada"}, "new_object": {"label": ")";
  const FactSet set = parse_facts(
      R"([{"triples": [], "type": "coverage", "edits": [)" + edit + "Ole\"}}," + edit + "Per\"}}]}]", "f.json");
  for (const Finding& finding : lint_facts(set)) EXPECT_EQ(finding.severity, Severity::kNote) << finding.check;
}

TEST(FactsLint, FixesWhatIsClear) {
  const FactSet set = facts({row(" {}  is in ", "A", "b"), row("{} was", "B\u200b", "c"), row("{} is in", "A", "b"),
                             row("{} is in", "A", "z")});
  size_t applied = 0;
  const FactSet fixed = fix_facts(set, lint_facts(set), &applied);
  EXPECT_EQ(fixed.facts[0].prompt, "{} is in");
  EXPECT_EQ(fixed.facts[1].subject, "B");
  ASSERT_EQ(fixed.facts.size(), 3U) << "the repeated request is gone, the contradiction is left to a person";
  EXPECT_EQ(applied, 3U);
  EXPECT_EQ(fixed.fingerprint, fingerprint(fixed.facts));
  for (const Finding& finding : lint_facts(fixed)) EXPECT_FALSE(finding.fixable()) << finding.check;
}

TEST(FactsLint, ARowInWhichAFixHasNoPlaceStaysAndIsNamed) {
  // Without its blanks the subject stands in the prompt twice.
  const std::string fine = R"({"prompt": "{}  is in", "subject": "A", "target_new": "b"})",
                    text = R"({"prompt": "A  B is like A B in", "subject": "A  B", "target_new": "b"})"
                           "\n" +
                           fine;
  const FactSet set = parse_facts(text, "f");
  std::vector<std::string> unmended;
  const auto fixed = fix_text(text, set, lint_facts(set), {}, &unmended);
  ASSERT_TRUE(fixed);
  EXPECT_EQ(unmended, std::vector<std::string>{set.facts[0].where()});
  EXPECT_EQ(*fixed,
            text.substr(0, text.size() - fine.size()) + R"({"prompt": "{} is in", "subject": "A", "target_new": "b"})");
}

TEST(FactsLint, FixesLeaveTheRestOfTheTextAsItIs) {
  const auto fixed = [](const std::string& text, const ReadOptions& given = {}) {
    ReadOptions options = given;
    options.bad_rows = BadRowPolicy::kSkip;
    const FactSet set = parse_facts(text, "f", options);
    return fix_text(text, set, lint_facts(set), options).value_or("a table");
  };
  const std::string a = R"({"prompt": "{} is in", "subject": "A", "target_new": "b"})",
                    other = R"({ "note":1.50, "prompt":"{} was", "subject":"B", "target_new":"" })";
  for (
      const auto& [text, expected] : std::vector<std::pair<std::string, std::string>>{
          {R"({"prompt": "{}  is\u00e9in", "subject": "A", "target_new": "b"})"
           "\r\n\r\n" +
               other + "\r\n" + a,
           R"({"prompt": "{} is\u00e9in", "subject": "A", "target_new": "b"})"
           "\r\n\r\n" +
               other + "\r\n" + a},
          {R"({"subject":"A\t","target_new":" b  c ","prompt":"{} is"})"
           "\n{\"prompt\": 3}",
           R"({"subject":"A","target_new":"b c","prompt":"{} is"})"
           "\n{\"prompt\": 3}"},
          {"[ " + a + ",\n  " + a + ",\n  " + other + "\n]\n", "[ " + a + ",\n  " + other + "\n]\n"},
          {"[" + a + ", " + other + "," + a + "]", "[" + a + ", " + other + "]"},
          {R"([{"requested_rewrite": {"prompt": "{}  is", "subject": "A", "target_new": {"str": "b", "id": "Q"}}}])",
           R"([{"requested_rewrite": {"prompt": "{} is", "subject": "A", "target_new": {"str": "b", "id": "Q"}}}])"},
          {R"({"prompt": "{} is", "subject": "A", "target_new": {"str": "b  c"}, "mine": 1})",
           R"({"prompt": "{} is", "subject": "A", "target_new": {"str": "b c"}, "mine": 1})"},
          // Blank entries and probes without an answer are not read: nothing moves into their places.
          {R"({"prompt": "{}  is", "subject": "A", "target_new": ["", "b"], "target_true": ["", "c", "d"], )"
           R"("paraphrase_prompts": ["", "p", "q"], "neighborhood_prompts": [" ", "n", "m"], "id": 123456789012345678901, )"
           R"("locality": {"k": [{"prompt": "x", "ground_truth": ""}, {"prompt": "y", "ground_truth": "z"}]}})",
           R"({"prompt": "{} is", "subject": "A", "target_new": ["", "b"], "target_true": ["", "c", "d"], )"
           R"("paraphrase_prompts": ["", "p", "q"], "neighborhood_prompts": [" ", "n", "m"], "id": 123456789012345678901, )"
           R"("locality": {"k": [{"prompt": "x", "ground_truth": ""}, {"prompt": "y", "ground_truth": "z"}]}})"},
          // The subject stands in the prompt, and other texts that are like one of the three stay.
          {R"({"prompt": "Was A  B here?", "subject": "A  B", "target_new": "b", "paraphrase_prompts": ["A  B"]})",
           R"({"prompt": "Was A B here?", "subject": "A B", "target_new": "b", "paraphrase_prompts": ["A  B"]})"},
          {R"({"prompt": "{} is", "subject": "A", "target_new": ["b  \"c", "d"]})",
           R"({"prompt": "{} is", "subject": "A", "target_new": ["b \"c", "d"]})"},
          {R"({"prompt": "{}\u3000is\u00a0in", "subject": "A", "target_new": "b"})",
           R"({"prompt": "{} is in", "subject": "A", "target_new": "b"})"},
          {a + "\n{\"prompt\": \n" + a, a + "\n{\"prompt\": "},  // a broken line stays
          {"prompt,subject,target_new\n{} is,A,b\n", "a table"}})
    EXPECT_EQ(fixed(text), expected);
  const std::string zsre = R"([{"subject": "A", "src": "Where is A?", "alt": "b  c", "answers": ["d  e"]}])";
  EXPECT_EQ(fixed(zsre, {.zsre_target = "alt"}),
            R"([{"subject": "A", "src": "Where is A?", "alt": "b c", "answers": ["d  e"]}])");
  EXPECT_EQ(fixed(zsre), R"([{"subject": "A", "src": "Where is A?", "alt": "b  c", "answers": ["d e"]}])");
  const std::string blank_answers = R"([{"subject": "A", "src": "Where is A?", "alt": "b  c", "answers": [""]}])";
  EXPECT_EQ(fixed(blank_answers, {.zsre_target = "alt"}),
            R"([{"subject": "A", "src": "Where is A?", "alt": "b c", "answers": [""]}])");
}

TEST(FactsLint, ARepeatedRequestThatAddsSomethingIsLeftToAPerson) {
  nlohmann::json more = row("{} is in", "A", "b");
  more["paraphrase_prompts"] = {"Where is A?"};
  for (const auto& [second, removed] : std::vector<std::pair<nlohmann::json, bool>>{
           {row("{} is in", "A", "b"), true}, {row("{} is in", "A", "B"), false}, {more, false}}) {
    const FactSet set = facts({row("{} is in", "A", "b"), second});
    const auto findings = lint_facts(set);
    ASSERT_EQ(findings.size(), 1U) << second;
    EXPECT_EQ(findings[0].check, "duplicate");
    EXPECT_EQ(findings[0].fixable(), removed) << second;
  }
}

TEST(FactsLint, BlanksAtTheEndsOfQuestionsAreTold) {
  nlohmann::json one = row("{} is in", "A", "b");
  one["paraphrase_prompts"] = {"Where is A? ", "A lies  in"};
  one["target_true"] = "c";
  one["neighborhood_prompts"] = {
      "\u3000"
      "B is in"};
  const auto findings = lint_facts(facts({one}));
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].check, "whitespace");
  EXPECT_FALSE(findings[0].fixable());
  EXPECT_NE(findings[0].text.find("a paraphrase \"Where is A? \" has a blank at an end, as have 1 other text"),
            std::string::npos)
      << findings[0].text;
}

TEST(FactsLint, BrokenLinesAreErrorsOfTheirOwn) {
  const std::string good = R"({"prompt": "{} is", "subject": "A", "target_new": "b"})";
  for (const auto& [text, lines] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
           {good + "\n{\"prompt\": \nnull\n" + good + "\n{\"a\": 1,}", {2, 3, 5}},
           {"prompt,subject,target_new\n{} is,A,b\nx\n{} is,\"A\" c,b\n{} was,A,c\n", {3, 4}}}) {
    const FactSet set = parse_facts(text, "f", {.bad_rows = BadRowPolicy::kSkip});
    EXPECT_EQ(set.facts.size(), 2U);
    std::vector<int64_t> found;
    for (const Finding& finding : lint_facts(set))
      if (finding.check == "unusable-row") found.push_back(line_of(finding));
    EXPECT_EQ(found, lines);
    EXPECT_THROW((void)parse_facts(text, "f"), Error) << "where rows must be right";
  }
  testing::expect_refused([&] { (void)parse_facts(good + ",\n" + good + "\n", "f"); }, ErrorClass::kCorruption,
                          {"f:1: a comma between rows"});
}

TEST(FactsLint, MoreFindingsComeFromOutside) {
  const FactSet set = facts({row("{} is in", "A", "b"), row("{} is  in", "B", "c")});
  const auto findings =
      lint_facts(set, {{Severity::kError, "already-known", 0, set.facts[0].where(), "the model says so already"}});
  ASSERT_EQ(findings.size(), 2U);
  EXPECT_EQ(findings[0].check, "already-known") << "in the order of the file";
}

TEST(FactsLint, EveryCheckIsDocumented) {
  std::set<std::string> names;
  for (const LintInfo& check : lint_checks()) EXPECT_TRUE(names.insert(check.name).second);
  EXPECT_EQ(names.size(), 24U);
}

TEST(FactsLint, RowsThatCannotBeReadAreNamedWhereNoneCanBe) {
  const std::string text = R"({"prompt": "{} is in", "subject": "Paris", "subject": "x", "target_new": "Rome"})"
                           "\n{\"prompt\": +}\n";
  const FactSet set = parse_facts(text, "f.jsonl", {.bad_rows = BadRowPolicy::kSkip, .allow_empty = true});
  EXPECT_TRUE(set.facts.empty());
  ASSERT_EQ(set.bad_rows.size(), 2U);
  EXPECT_NE(set.bad_rows[0].text.find("\"subject\" is given twice"), std::string::npos) << set.bad_rows[0].text;
}

}  // namespace facts_lint_test
}  // namespace emend::datasets
