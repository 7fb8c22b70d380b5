#include <set>

#include "support/collected_events.h"
#include "support/fact_texts.h"

namespace emend::datasets {
namespace facts_readers_test {

TEST(FactsReaders, NumbersAreAnswersAsPeopleWriteThem) {
  const auto answer = [](const std::string& number) {
    return read(R"({"prompt": "{} is", "subject": "A", "target_new": )" + number + "}").facts.at(0).target_new;
  };
  for (const auto& [number, text] :
       std::map<std::string, std::string>{{"1969", "1969"},
                                          {"1969.0", "1969"},
                                          {"1e3", "1000"},
                                          {"-2.0", "-2"},
                                          {"3.25", "3.25"},
                                          {"18446744073709551615", "18446744073709551615"}})
    EXPECT_EQ(answer(number), text);
  for (const char* number : {"1234567890123456789012", "1e300"})
    expect_parts(refusal(R"({"prompt": "{} is", "subject": "A", "target_new": )" + std::string(number) + "}"),
                 {"field \"target_new\" is a number of more digits than are kept", "as a string"});
}

TEST(FactsReaders, WhatAnswersAndProbesHaveBesideIsKeptOrTold) {
  const std::string row = R"({"prompt": "{} is", "subject": "A", "target_new": )";
  const Fact fact = read(row + R"({"str": "x", "id": "Q1", "aliases": ["y"]}})").facts.at(0);
  EXPECT_EQ(fact.extra["target_new_id"], "Q1");
  EXPECT_EQ(fact.extra["target_new.aliases"], nlohmann::json({"y"}));
  const FactSet set =
      read(row + R"("x", "locality": {"k": [{"prompt": "p", "ground_truth": "g", "note": 1}]}, "own": 1})");
  ASSERT_EQ(set.unread.size(), 2U);
  for (const UnreadKey& key : set.unread) EXPECT_EQ(key.kept, key.key == "own") << key.key;
}

TEST(FactsReaders, AKeyThatIsProbablyASlipIsToldAsTheFileIsRead) {
  const auto sink = std::make_shared<testing::CollectedEvents>();
  const std::string row = R"({"prompt": "{} is", "subject": "A", "target_new": "x", "own": 1, "paraphrases": ["A"]})";
  (void)parse_facts(row, "f.json", {}, Log({sink}));
  ASSERT_EQ(sink->events.size(), 1U);
  EXPECT_EQ(sink->events[0].level, LogLevel::kWarning);
  expect_parts(sink->events[0].text, {"f.json:1: the key \"paraphrases\"", "did you mean"});
}

TEST(FactsReaders, FactsWithoutANumberTakeNone) {
  const std::string bare = R"({"prompt": "{} is", "subject": "A", "target_new": "x"})";
  const FactSet set =
      read(bare + "\n" + bare + "\n" + R"({"case_id": 1, "prompt": "{} is", "subject": "A", "target_new": "x"})");
  std::vector<int64_t> ids;
  for (const Fact& fact : set.facts) ids.push_back(fact.case_id);
  EXPECT_EQ(ids, (std::vector<int64_t>{0, 2, 1}));
}

TEST(FactsReaders, AKeyIsGivenOnce) {
  const std::string twice = R"("target_new": {"str": "x", "str": "y"}})",
                    row = R"({"prompt": "{} is", "subject": "A", )";
  expect_parts(refusal(row + R"("target_new": "x", "target_new": "y"})"),
               {"f.json:1: the key \"target_new\" is given twice in one object", "every key once"});
  expect_parts(refusal(row + "\"target_new\": \"x\"}\n" + row + twice), {"f.json:2: the key \"str\""});
  expect_parts(refusal("[{\"requested_rewrite\":\n" + row + "\n" + twice + "}]"), {"f.json:3: the key \"str\""});
}

TEST(FactsReaders, KeysThatNothingReadsAreTold) {
  const std::string row = R"({"prompt": "{} is", "subject": "A", "target_new": "x", )";
  const auto meant = [](const std::string& text) {
    std::string keys;
    for (const UnreadKey& key : read(text).unread)
      keys += key.key + "=" + key.meant + "@" + key.where + "x" + std::to_string(key.times) + " ";
    return keys;
  };
  EXPECT_EQ(meant(row + R"("Subject": "B", "targetnew": "y", "paraphrases": ["z"], "note": 1})"),
            "Subject=subject@f.json:1x1 note=@f.json:1x1 paraphrases=paraphrase_prompts@f.json:1x1 "
            "targetnew=target_new@f.json:1x1 ");
  EXPECT_EQ(meant(row + "\"pa\": 1}\n" + row + "\"ground_thruth\": 1}\n" + row + "\"ground_thruth\": 1}"),
            "pa=@f.json:1x1 ground_thruth=ground_truth@f.json:2x2 ");
  EXPECT_EQ(meant(row + R"("locality": {"k": [{"prompt": "p", "groundtruth": "g"}]}})"),
            "locality.k.groundtruth=ground_truth@f.json:1x1 ");
  EXPECT_EQ(
      meant(R"([{"requested_rewrite": {"prompt": "{} is", "subject": "A", "target_new": "x", "Relation-ID": 1}}])"),
      "requested_rewrite.Relation-ID=relation_id@f.json:1x1 ");
  EXPECT_EQ(
      meant(
          R"([{"requested_rewrite": [{"prompt": "{} is", "subject": "A", "target_new": {"str": "x", "iq": 1}, "pro": 1}],
    "questions": [], "single_hops": [{"question": "q", "answr": "a"}], "new_single_hops": [{"own": 1}]}])"),
      "requested_rewrite.target_new.iq=@f.json:1x1 requested_rewrite.pro=@f.json:1x1 "
      "single_hops.answr=answer@f.json:1x1 new_single_hops.own=@f.json:1x1 ");
  EXPECT_EQ(
      meant(R"([{"edit": {"relation": {"prompt": "{} is", "qery": "q", "id": "P"}, "subject": {"label": "A", "no": 1},
    "object": {"labell": "y"}, "new_object": {"label": "x", "x": 1}, "own": 1}, "true_objects": [{"id": 1, "labl": "z"}]}])"),
      "edit.object.labell=label@f.json:1x1 edit.own=@f.json:1x1 edit.relation.qery=query@f.json:1x1 "
      "edit.subject.no=@f.json:1x1 edit.new_object.x=@f.json:1x1 true_objects.labl=label@f.json:1x1 ");
  for (const char* known : {"cond", "case_id", "target_true_aliases"})
    EXPECT_EQ(meant(row + "\"" + known + "\": 1}"), "") << known;
  expect_parts(refusal(row + "\"x\": 1}\n" + R"({"prompt": "{} is", "subject": "A", "targetnew": "x"})"),
               {"f.json:2: field \"target_new\" is missing", "rename \"targetnew\""});
  expect_parts(refusal(R"({"prompt": "{} is", "Subject": "A", "target_new": "x"})"),
               {"did you mean \"subject\" by \"Subject\"?"});
}

TEST(FactsReaders, PlacesInAListAreItsRows) {
  const nlohmann::json good = {{"prompt", "{} is"}, {"subject", "A"}, {"target_new", "x"}}, bad = {{"prompt", "x"}};
  const FactSet set =
      parse_fact_rows({good, bad, good}, "facts", {.bad_rows = BadRowPolicy::kSkip, .allow_empty = true});
  EXPECT_EQ(set.facts.at(1).where(), "facts[2]");
  EXPECT_EQ(set.bad_rows.at(0).where, "facts[1]");
  EXPECT_EQ(set.path, "facts");
  EXPECT_EQ(parse_fact_rows(good, "facts").facts.at(0).where(), "facts[0]");
  EXPECT_EQ(parse_fact_rows(good.dump() + "\n" + good.dump(), "facts").facts.at(1).where(), "facts:2");
  for (const auto& [given, place] :
       std::vector<std::pair<nlohmann::json, std::string>>{{{good, bad}, "facts[1]: "},
                                                           {{good, 3}, "facts[1]: a row that is not an object"},
                                                           {5, "facts:1: "},
                                                           {nlohmann::json::array(), "facts: an empty list"}})
    testing::expect_refused([&] { (void)parse_fact_rows(given, "facts"); }, ErrorClass::kCorruption, {place});
}

constexpr const char* kCounterFact = R"json([
{"case_id": 7, "pararel_idx": 912,
 "requested_rewrite": {"prompt": "{} was founded in the city of", "relation_id": "P740", "subject": "Orvell Motors",
   "target_new": {"str": "Lisbon", "id": "Q597"}, "target_true": {"str": "Turin", "id": "Q495"}},
 "paraphrase_prompts": ["Some filler. Orvell Motors originated in", "Orvell Motors was started in"],
 "neighborhood_prompts": ["Bramante Auto was founded in the city of"],
 "attribute_prompts": ["Tagus Works was founded in"], "generation_prompts": ["Orvell Motors is known for"],
 "portability": {"Recalled Relation": "(Lisbon, capital of, Portugal)", "New Question": "In which country was Orvell Motors founded?", "New Answer": "Portugal"},
 "unrelated_relation": {"relation_id": "industry", "object": "cars", "question": "What does Orvell Motors make?"},
 "distracting_neighborhood_prompts": ["Orvell Motors was founded in the city of Lisbon. Bramante Auto was founded in"],
 "alternative_subject": "Orvell Works", "note": [1, 2]}
])json";

TEST(FactsReaders, CounterFactWithEveryExtra) {
  const FactSet set = read(kCounterFact);
  EXPECT_EQ(set.format, "counterfact");
  ASSERT_EQ(set.facts.size(), 1U);
  const Fact& fact = set.facts[0];
  EXPECT_EQ(fact.case_id, 7);
  EXPECT_EQ(fact.prompt, "{} was founded in the city of");
  EXPECT_EQ(fact.full_prompt(), "Orvell Motors was founded in the city of");
  EXPECT_EQ(fact.target_new, "Lisbon");
  EXPECT_EQ(fact.target_true, "Turin");
  EXPECT_EQ(fact.relation_id, "P740");
  EXPECT_EQ(fact.paraphrase_prompts.size(), 2U);
  EXPECT_EQ(fact.neighborhood_prompts, std::vector<std::string>{"Bramante Auto was founded in the city of"});
  EXPECT_EQ(fact.distracting_prompts.size(), 1U);
  EXPECT_EQ(fact.portability.at("one_hop")[0].answers, std::vector<std::string>{"Portugal"});
  EXPECT_EQ(fact.portability.at("Subject_Aliasing")[0].prompt, "Orvell Works was founded in the city of");
  EXPECT_EQ(fact.locality.at("unrelated_relation")[0].answers, std::vector<std::string>{"cars"});
  EXPECT_EQ(fact.extra["pararel_idx"], 912);
  EXPECT_EQ(fact.extra["target_new_id"], "Q597");
  EXPECT_EQ(fact.extra["note"], nlohmann::json({1, 2}));
  EXPECT_EQ(fact.line, 2);
  EXPECT_EQ(fact.where(), "f.json:2");
  EXPECT_EQ(set.fingerprint.size(), 64U);
}

constexpr const char* kZsre =
    R"([{"subject": "Mara Quill", "src": "What school did Mara Quill attend?", "pred": "Harvard",
 "rephrase": "At which school was Mara Quill educated?", "alt": "Oslo Academy", "answers": ["Bergen College", "BC"],
 "loc": "nq question: who wrote the glass harbour", "loc_ans": "T. Lindqvist", "cond": "Harvard >> Oslo Academy || x"},
 {"subject": "Ines Rue", "src": "Where does Ines Rue live?", "alt": " ", "answers": ["Ghent"]}])";

TEST(FactsReaders, ZsreEitherTarget) {
  const FactSet answers = read(kZsre);
  EXPECT_EQ(answers.format, "zsre");
  EXPECT_EQ(answers.choices["zsre_target"], "answers");
  ASSERT_EQ(answers.facts.size(), 2U);
  EXPECT_EQ(answers.facts[0].prompt, "What school did {} attend?");
  EXPECT_EQ(answers.facts[0].target_new, "Bergen College");
  EXPECT_FALSE(answers.facts[0].target_true.has_value());
  EXPECT_EQ(answers.facts[0].paraphrase_prompts, std::vector<std::string>{"At which school was Mara Quill educated?"});
  EXPECT_EQ(answers.facts[0].locality.at("loc")[0].prompt, "nq question: who wrote the glass harbour");
  EXPECT_EQ(answers.facts[0].extra["alt"], "Oslo Academy");

  auto sink = std::make_shared<testing::CollectedEvents>();
  const FactSet alt = parse_facts(kZsre, "f.json", {.zsre_target = "alt"}, Log({sink}));
  EXPECT_EQ(alt.choices["zsre_target"], "alt");
  ASSERT_EQ(alt.facts.size(), 1U);
  EXPECT_EQ(alt.skipped.size(), 1U);
  EXPECT_EQ(alt.facts[0].target_new, "Oslo Academy");
  EXPECT_EQ(alt.facts[0].target_true, "Bergen College");
  EXPECT_EQ(alt.facts[0].target_true_aliases, std::vector<std::string>{"BC"});
  ASSERT_EQ(sink->events.size(), 1U);
  expect_parts(sink->events[0].text, {"1 of 2 rows have no target", "f.json:4: \"alt\" is blank"});
  EXPECT_NE(alt.fingerprint, answers.fingerprint);
}

TEST(FactsReaders, EasyEditFlatRows) {
  const FactSet set = read(
      R"([{"case_id": 3, "prompt": "The mother tongue of Ada Nilsen is", "target_new": "English", "subject": "Ada Nilsen", "ground_truth": "Danish",
    "rephrase_prompt": "Ada Nilsen speaks", "locality_prompt": "Per Aas speaks", "locality_ground_truth": "Danish", "portability_prompt": "q", "portability_ground_truth": ["a", "b"],
    "locality": {"other": {"prompt": ["x is", "y is"], "ground_truth": ["1", ["2", "two"]]}}}])");
  EXPECT_EQ(set.format, "easyedit");
  const Fact& fact = set.facts.at(0);
  EXPECT_EQ(fact.prompt, "The mother tongue of {} is");
  EXPECT_EQ(fact.target_true, "Danish");
  EXPECT_EQ(fact.paraphrase_prompts, std::vector<std::string>{"Ada Nilsen speaks"});
  EXPECT_EQ(fact.locality.at("neighborhood")[0].answers, std::vector<std::string>{"Danish"});
  EXPECT_EQ(fact.neighborhood_prompts, std::vector<std::string>{"Per Aas speaks"});
  EXPECT_EQ(fact.locality.at("other")[1].answers, (std::vector<std::string>{"2", "two"}));
  EXPECT_EQ(fact.portability.at("portability")[0].answers, (std::vector<std::string>{"a", "b"}));
}

TEST(FactsReaders, KnowEditEverySpellingOfGroundTruth) {
  const FactSet set = read(
      R"([{"subject": "Nordhaven", "prompt": "The mayor of Nordhaven is", "target_new": "Iris Vold", "ground_truth": ["Per Aas", "P. Aas"],
    "portability": {"Reasoning": [{"prompt": "Their spouse is", "ground_truth": [["Leo Vold", "Leo"], ["L. Vold"]]}, {"prompt": "blank", "ground_truth": [[""]]}], "Logical_Generalization": []},
    "locality": {"Relation_Specificity": [{"prompt": "The area is", "ground_truth": "31 km2"}, {"prompt": "Founded in", "ground_truth": 1998}, {"prompt": "n", "ground_truth": null}], "Forgetfulness": null}}])");
  EXPECT_EQ(set.format, "knowedit");
  const Fact& fact = set.facts.at(0);
  EXPECT_EQ(fact.case_id, 0);
  EXPECT_EQ(fact.target_true_aliases, std::vector<std::string>{"P. Aas"});
  ASSERT_EQ(fact.portability.size(), 1U);
  ASSERT_EQ(fact.portability.at("Reasoning").size(), 1U);
  EXPECT_EQ(fact.portability.at("Reasoning")[0].answers, (std::vector<std::string>{"Leo Vold", "Leo", "L. Vold"}));
  ASSERT_EQ(fact.locality.at("Relation_Specificity").size(), 2U);
  EXPECT_EQ(fact.locality.at("Relation_Specificity")[1].answers, std::vector<std::string>{"1998"});
  EXPECT_EQ(
      read(R"([{"subject": "A", "prompt": "A is", "target_new": "b", "locality": {}, "portability": {}}])").format,
      "knowedit");
}

TEST(FactsReaders, KnowEditBiographiesAndOpinions) {
  const FactSet bio = read(
      R"([{"text": "This is a passage about mara quill. Mara Quill, or mara quill, wrote.", "labels": "She lived in Oslo.", "concept": "mara quill",
    "locality": {"Relation_Specificity": [{"prompt": "p", "ground_truth": ["g"]}]}}])");
  EXPECT_EQ(bio.format, "knowedit");
  EXPECT_EQ(bio.facts.at(0).prompt, "This is a passage about {}. Mara Quill, or mara quill, wrote.");
  EXPECT_EQ(bio.facts.at(0).target_new, "She lived in Oslo.");
  const std::string opinions = R"([{"ent": "Oslo", "pos": [" ", " I love it. "], "neg": ["No."]}])";
  EXPECT_EQ(read(opinions).facts.at(0).target_new, "I love it.");
  EXPECT_EQ(read(opinions).choices["sentiment"], "pos");
  EXPECT_EQ(read(opinions, {.sentiment = "neg"}).facts.at(0).target_new, "No.");
  EXPECT_EQ(read(opinions).facts.at(0).extra["neg"], nlohmann::json({"No."}));
}

TEST(FactsReaders, MquakeKeepsInstances) {
  const FactSet set = read(R"([{"case_id": 3, "requested_rewrite": [
     {"prompt": "{} plays for", "relation_id": "P54", "subject": "Ada Nilsen", "question": "Which team?", "target_new": {"str": "Kite FC", "id": "Q1"}, "target_true": {"str": "Pine FC", "id": "Q2"}},
     {"prompt": "{} is based in", "relation_id": "P159", "subject": "Kite FC", "target_new": {"str": "Alta"}, "target_true": {"str": "Oslo"}}],
    "questions": ["In which city?", "Where?"], "answer": "Moss", "answer_alias": ["M"], "new_answer": "Alta", "new_answer_alias": ["Alta town", "Alta"],
    "single_hops": [{"question": "q", "cloze": "c", "answer": "a", "answer_alias": ["b"]}], "new_single_hops": [], "orig": {"triples": []}}])");
  EXPECT_EQ(set.format, "mquake");
  ASSERT_EQ(set.facts.size(), 2U);
  ASSERT_EQ(set.groups.size(), 1U);
  const FactGroup& group = set.groups[0];
  EXPECT_EQ(group.case_id, 3);
  EXPECT_EQ(group.kind, "mquake");
  EXPECT_FALSE(group.sequential);
  EXPECT_EQ(group.facts, (std::vector<size_t>{0, 1}));
  EXPECT_EQ(group.new_answers, (std::vector<std::string>{"Alta", "Alta town"}));
  EXPECT_EQ(group.single_hops.at(0).answers, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(group.extra["orig"]["triples"], nlohmann::json::array());
  EXPECT_EQ(set.facts[1].case_id, 1) << "facts are numbered through";
  EXPECT_EQ(set.facts[0].paraphrase_prompts, std::vector<std::string>{"Which team?"});
}

TEST(FactsReaders, ConflictEditAndRoundEdit) {
  const std::string edit =
      R"({"relation": {"id": "P22", "prompt": "The father of {} is", "query": "Who is the father of {}?", "label": "father"}, "subject": {"id": "Q1", "label": "Ada"},
     "object": {"id": "Q2", "label": "Per"}, "new_object": {"id": "Q3", "label": "Ole"}})";
  const FactSet pair =
      read(R"([{"triples": [], "prerequisites": [], "type": "coverage", "edits": [)" + edit + "," + edit + "]}]");
  EXPECT_EQ(pair.format, "conflictedit");
  EXPECT_EQ(pair.groups.at(0).kind, "conflict-coverage");
  EXPECT_TRUE(pair.groups.at(0).sequential);
  EXPECT_EQ(pair.facts.size(), 2U);
  EXPECT_EQ(pair.facts[0].target_new, "Ole");
  EXPECT_EQ(pair.facts[0].target_true, "Per");
  EXPECT_EQ(pair.facts[0].paraphrase_prompts, std::vector<std::string>{"Who is the father of Ada?"});
  const FactSet round =
      read(R"([{"type": "1-2@P22", "edit": )" + edit + R"(, "true_objects": [{"label": "Per"}, {"label": "Pål"}]}])");
  EXPECT_EQ(round.groups.at(0).kind, "round");
  EXPECT_EQ(round.groups.at(0).answers, (std::vector<std::string>{"Per", "Pål"}));
}

TEST(FactsReaders, ShortFormFastEditAndMemitRequests) {
  const FactSet brief =
      read("{\"prompt\": \"{} is in the city of\", \"subject\": \"The Eiffel Tower\", \"target_new\": \" Rome\"}");
  EXPECT_EQ(brief.format, "jsonl");
  EXPECT_EQ(brief.facts.at(0).target_new, "Rome");
  const FactSet request =
      read(R"([{"prompt": "{} plays the sport of", "subject": "LeBron James", "target_new": {"str": "football"}}])");
  EXPECT_EQ(request.facts.at(0).target_new, "football");
  EXPECT_EQ(read(R"([{"prompt": "{} began in", "subject": "It", "target_new": 1969}])").facts.at(0).target_new, "1969");
  const FactSet fast =
      read(R"([{"prompt": "{} is the capital of", "subject": "Oslo", "target": "Chile", "queries": ["Oslo?"]}])");
  EXPECT_EQ(fast.format, "fastedit");
  EXPECT_EQ(fast.facts.at(0).paraphrase_prompts, std::vector<std::string>{"Oslo?"});
}

TEST(FactsReaders, EveryLayoutOfTheSameRows) {
  const std::string a = R"({"prompt": "{} is", "subject": "A", "target_new": "x"})",
                    b = R"({"prompt": "{} is", "subject": "B", "target_new": "y"})";
  const std::string once = read("[" + a + "," + b + "]").fingerprint;
  for (const std::string& text : {"[\n" + a + ",\n" + b + "\n]\n", a + "\n" + b, a + "\r\n" + b + "\r\n",
                                  "\n\n" + a + "\n\n" + b + "\n", "\xEF\xBB\xBF[" + a + "," + b + "]", a + " " + b,
                                  nlohmann::json::parse(a).dump(2) + "\n" + nlohmann::json::parse(b).dump(2)})
    EXPECT_EQ(read(text).fingerprint, once) << text;
  EXPECT_EQ(read(a + "\n\n" + b).facts[1].line, 3);
  EXPECT_EQ(read("[" + nlohmann::json::parse(a).dump(1) + ",\n" + b + "]").facts[1].line, 6);
}

TEST(FactsReaders, SubjectRule) {
  const auto with = [](const std::string& prompt, const std::string& subject) {
    return nlohmann::json({{{"prompt", prompt}, {"subject", subject}, {"target_new", "x"}}}).dump();
  };
  EXPECT_EQ(read(with("The Rome of {} and Rome", "Rome")).facts[0].prompt, "The Rome of {} and Rome")
      << "a given {} wins";
  EXPECT_EQ(read(with("In Oslo, people", "Oslo")).facts[0].prompt, "In {}, people");
  EXPECT_EQ(read(with("東京は日本の", "東京")).facts[0].prompt, "{}は日本の");
  expect_parts(
      refusal(with("In Bergen, people", "Oslo")),
      {"f.json:1: field \"prompt\"", "neither {} nor the subject \"Oslo\"", "write {} where the subject belongs"});
  expect_parts(refusal(with("In oslo, people", "Oslo")), {"other capitals"});
  expect_parts(refusal(with("New York, New York is", "New York")), {"occurs 2 times", "write {} at the occurrence"});
  expect_parts(refusal(with("{} and {} are", "Oslo")), {"2 places for the subject", "exactly one {}"});
}

TEST(FactsReaders, BadRowsNameFileLineAndField) {
  const std::string good = R"({"prompt": "{} is", "subject": "A", "target_new": "x"})";
  expect_parts(refusal("[" + good + ",\n" + R"({"prompt": "{} is", "target_new": "x"}])"),
               {"f.json:2: field \"subject\" is missing", "expected a string"});
  expect_parts(refusal("[" + good + ",\n\n" + R"({"prompt": 5, "subject": "A", "target_new": "x"}])"),
               {"f.json:3: field \"prompt\" is the number 5"});
  expect_parts(refusal(good + "\n" + R"({"prompt": "{} is", "subject": " ", "target_new": "x"})"),
               {"f.json:2: field \"subject\" is blank"});
  expect_parts(refusal(good + "\n" + R"({"prompt": "{} is", "subject": "A"})"), {"field \"target_new\" is missing"});
  expect_parts(refusal(good + "\n" + R"({"prompt": "{} is", "subject": "A", "target_new": true})"),
               {"field \"target_new\" is true"});
  expect_parts(refusal(good + "\n" +
                       R"({"prompt": "{} is", "subject": "A", "target_new": "x", "paraphrase_prompts": ["a", 3]})"),
               {"field \"paraphrase_prompts[1]\" is the number 3"});
  expect_parts(refusal(good + "\n" + R"({"prompt": "{} is", "subject": "A", "target_new": "x", "case_id": "seven"})"),
               {"field \"case_id\" is a string", "a whole number"});
  expect_parts(
      refusal(good + "\n" +
              R"({"prompt": "{} is", "subject": "A", "target_new": "x", "locality": {"k": [{"ground_truth": "y"}]}})"),
      {"field \"locality.k[0].prompt\" is missing"});
  expect_parts(
      refusal(
          R"([{"requested_rewrite": {"prompt": "{} is", "subject": "A", "target_new": {"str": "x"}, "relation_id": 7}}])"),
      {"field \"requested_rewrite.relation_id\" is the number 7"});
  expect_parts(refusal(R"([{"requested_rewrite": [{"prompt": "{} is", "subject": "A"}]}])"),
               {"field \"requested_rewrite[0].target_new\" is missing"});
  (void)refusal("[{\"prompt\": \"x\", \"subject\": \"A\", \"target_new\": \"b\"}]");
}

TEST(FactsReaders, BadRowsCanBeSkippedAndAreCounted) {
  const std::string text =
      "{\"prompt\": \"{} is\", \"subject\": \"A\", \"target_new\": \"x\"}\n{\"prompt\": \"nothing\", \"subject\": "
      "\"A\", \"target_new\": \"x\"}\n";
  auto sink = std::make_shared<testing::CollectedEvents>();
  const FactSet set = parse_facts(text, "f.json", {.bad_rows = BadRowPolicy::kSkip}, Log({sink}));
  EXPECT_EQ(set.facts.size(), 1U);
  EXPECT_EQ(set.rows, 2);
  ASSERT_EQ(set.bad_rows.size(), 1U);
  EXPECT_EQ(set.bad_rows[0].line, 2);
  ASSERT_EQ(sink->events.size(), 1U);
  expect_parts(sink->events[0].text, {"1 of 2 rows cannot be used"});
}

TEST(FactsReaders, OffsetAndLimitCutUsableRows) {
  std::string text;
  for (int i = 0; i < 10; ++i)
    text += "{\"prompt\": \"{} is\", \"subject\": \"S" + std::to_string(i) + "\", \"target_new\": \"" +
            (i == 2 ? "" : "x") + "\"}\n";
  const auto subjects = [&](int64_t offset, int64_t limit) {
    std::string list;
    for (const Fact& fact : read(text, {.offset = offset, .limit = limit}).facts)
      list += fact.subject + ":" + std::to_string(fact.case_id) + " ";
    return list;
  };
  EXPECT_EQ(subjects(0, 3), "S0:0 S1:1 S3:2 ");
  EXPECT_EQ(subjects(3, 2), "S4:3 S5:4 ");
  EXPECT_EQ(subjects(7, -1), "S8:7 S9:8 ");
  expect_parts(refusal(text, {.offset = 9}, ErrorClass::kInvalidArgument), {"an offset of 9", "9 usable rows"});
  EXPECT_EQ(read(text, {.limit = 2}).rows, 2);
}

TEST(FactsReaders, RepeatedCaseIdsAreRenumbered) {
  auto sink = std::make_shared<testing::CollectedEvents>();
  const std::string row = R"({"case_id": 5, "prompt": "{} is", "subject": "A", "target_new": "x"})";
  const FactSet set = parse_facts(row + "\n" + row + "\n" + row, "f", {}, Log({sink}));
  std::set<int64_t> ids;
  for (const Fact& fact : set.facts) ids.insert(fact.case_id);
  EXPECT_EQ(ids.size(), 3U);
  EXPECT_EQ(set.facts[0].case_id, 5);
  ASSERT_EQ(sink->events.size(), 1U);
  expect_parts(sink->events[0].text, {"2 rows repeat a case_id"});
}

TEST(FactsReaders, OptionsAndFormats) {
  const std::string row = R"({"prompt": "{} is", "subject": "A", "target_new": "x"})";
  const auto refused = [&](const ReadOptions& options, const std::vector<std::string>& parts) {
    expect_parts(refusal(row, options, ErrorClass::kInvalidArgument), parts);
  };
  refused({.format = "counterfct"}, {"unknown format \"counterfct\"", "did you mean \"counterfact\"?"});
  expect_parts(refusal(row, {.format = "zsre"}), {"f.json:1: field \"src\" is missing"});
  refused({.limit = 0}, {"limit: 0"});
  refused({.offset = -1}, {"offset: -1"});
  refused({.zsre_target = "true"}, {"answers", "alt"});
  expect_parts(refusal(R"([{"question": "q", "choices": []}])"),
               {"f.json:1: a row with the keys choices, question", "counterfact, mquake", "shortest row"});
  expect_parts(refusal(R"([{"known_id": 0, "subject": "A", "attribute": "b", "prompt": "A is"}])"), {"emend trace"});
  expect_parts(refusal(R"([{"prompt": "{} is", "subject": "A", "target_new": " "}])"),
               {"no usable fact in 1 row;", "\"target_new\" is blank"});
  std::set<std::string> names;
  for (const FormatInfo& format : fact_formats()) {
    EXPECT_FALSE(format.summary.empty());
    names.insert(format.name);
  }
  for (const char* name : {"counterfact", "zsre", "easyedit", "knowedit", "mquake", "fastedit", "jsonl"})
    EXPECT_TRUE(names.contains(name)) << name;
}

TEST(FactsReaders, FingerprintSeesContentNotLayout) {
  FactSet set = read(kCounterFact);
  const std::string before = set.fingerprint;
  EXPECT_EQ(fingerprint(set.facts), before);
  set.facts[0].line = 99;
  set.facts[0].source = "elsewhere";
  EXPECT_EQ(fingerprint(set.facts), before);
  set.facts[0].generation_prompts.push_back("one more");
  EXPECT_NE(fingerprint(set.facts), before);
}

TEST(FactsReaders, FingerprintSeesWhatGroupsAsk) {
  const auto print = [](const std::string& question, const std::string& alias, const std::string& hop) {
    return read(
               R"([{"requested_rewrite": [{"prompt": "{} is", "subject": "A", "target_new": {"str": "x"}}], "questions": [")" +
               question + R"("], "answer": "Moss", "new_answer": "Alta", "new_answer_alias": [")" + alias +
               R"("], "single_hops": [{"question": ")" + hop + R"(", "cloze": "c", "answer": "a"}]}])")
        .fingerprint;
  };
  std::set<std::string> all = {print("Where?", "b", "q"), print("Where is it?", "b", "q"), print("Where?", "c", "q"),
                               print("Where?", "b", "r")};
  EXPECT_EQ(all.size(), 4U);
  EXPECT_TRUE(all.contains(print("Where?", "b", "q")));
}

TEST(FactsReaders, ValidateFactsBuiltInCode) {
  Fact fact;
  fact.prompt = "{} is";
  fact.subject = "A";
  fact.target_new = "b";
  EXPECT_NO_THROW(validate(fact));
  for (const auto& [member, value] : std::vector<std::pair<std::string Fact::*, std::string>>{
           {&Fact::prompt, "no slot"}, {&Fact::prompt, "{} {}"}, {&Fact::subject, " "}, {&Fact::target_new, ""}}) {
    Fact bad = fact;
    bad.*member = value;
    EXPECT_THROW(validate(bad, "here"), Error);
  }
}

TEST(FactsReaders, KnownFacts) {
  const std::string text =
      R"([{"known_id": 4, "subject": "Vinson Massif", "attribute": "Antarctica", "template": "{} is in", "prediction": " x", "prompt": "Vinson Massif is in the continent of", "relation_id": "P30"},
 {"subject": "Beats", "attribute": "Apple", "prompt": "Beats is owned by"}])";
  const auto facts = parse_known_facts(text, "k.json");
  ASSERT_EQ(facts.size(), 2U);
  EXPECT_EQ(facts[0].case_id, 4);
  EXPECT_EQ(facts[0].target_true, "Antarctica");
  EXPECT_EQ(facts[0].prompt, "{} is in the continent of");
  EXPECT_EQ(facts[1].case_id, 1);
  EXPECT_EQ(facts[1].subject, "Beats");
  EXPECT_THROW((void)parse_known_facts("[]", "k.json"), Error);
  EXPECT_THROW((void)parse_known_facts(R"([{"subject": "A", "attribute": "b", "prompt": "c"}])", "k.json"), Error);
}

}  // namespace facts_readers_test
}  // namespace emend::datasets
