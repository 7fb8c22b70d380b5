// What the family "free" asks in both styles, and how it reads the answers, on a tiny model.
#include <emend/core/error.h>
#include <emend/evaluation/detail/free_prompts.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/free_text.h>
#include <emend/models/checkpoint.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>

#include "support/editor_models.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace emend::evaluation {
namespace metrics_free_test {

using nlohmann::json;

// With the template of Phi-3, whose turns end with the tokenizer's only special token; `first` stands before them.
models::Model chat_model(bool with_template = true, const std::string& first = "") {
  const testing::TemporaryFolder folder("metrics-free");
  testing::write_tiny_model(folder.path(), 3, {{"max_position_embeddings", 1024}});
  if (with_template)
    write_file(
        folder.path() / "tokenizer_config.json",
        R"({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>",
                   "chat_template": ")" +
            first +
            R"({% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"})");
  return models::load_model(folder.path().string());
}

datasets::FactSet some_facts() {
  datasets::Fact fact;
  fact.prompt = "{} stands in";
  fact.subject = "Rome Tower";
  fact.target_new = "Oslo";
  fact.target_true = "Rome";
  fact.paraphrase_prompts = {"It rained. Rome Tower, in", "Where does Rome Tower stand?"};
  fact.neighborhood_prompts = {"Old Mill stands in"};
  fact.portability["kind"] = {{"In which land does Rome Tower stand?", {"Norway", "Norge"}},
                              {"Rome Tower's king is", {"Harald"}},
                              {"a third one is not asked", {"x"}}};
  datasets::Fact other = fact;
  other.prompt = "Who built {}?";
  other.case_id = 1;
  other.portability.clear();
  datasets::FactSet set;
  set.facts = {fact, other};
  return set;
}

Evaluation evaluated(const models::Model& model, const datasets::FactSet& facts, const std::string& style,
                     const Evaluation* before = nullptr) {
  EvaluateOptions options;
  options.free_style = style;
  options.before = before;
  return evaluate(model, facts, {"free"}, options);
}

std::vector<std::string> groups_of(const json& raw) {
  std::vector<std::string> groups;
  for (const auto& [group, texts] : raw.items()) groups.push_back(group);
  return groups;
}

TEST(MetricsFree, MessagesAreQuestionsOrSentencesToComplete) {
  EXPECT_EQ(detail::as_message("Rome Tower stands in", "Rome Tower"), "Complete the sentence: Rome Tower stands in");
  EXPECT_EQ(detail::as_message("It rained. Rome Tower stands in", "Rome Tower"),
            "It rained.\n\nComplete the sentence: Rome Tower stands in");
  EXPECT_EQ(detail::as_message("It rained. Who built it?", "it"), "It rained. Who built it?");
  EXPECT_EQ(detail::as_message("Panic! at the Disco is from", "Panic! at the Disco"),
            "Complete the sentence: Panic! at the Disco is from");
  std::map<std::string, std::vector<std::string>> prompts;
  for (const auto& one : detail::asked_texts(some_facts(), 0, 1, true, false))
    prompts[one.group()].push_back(one.prompt);
  using List = std::vector<std::string>;
  EXPECT_EQ(prompts["edit_chat"], List{"Complete the sentence: Rome Tower stands in"});
  EXPECT_EQ(prompts["paraphrase_chat"],
            (List{"It rained.\n\nComplete the sentence: Rome Tower, in", "Where does Rome Tower stand?"}));
  EXPECT_EQ(prompts["question_chat"], List{"Rome Tower stands in what?"});
  EXPECT_EQ(prompts["negation_chat"], List{"Complete the sentence: It is not true that Rome Tower stands in"});
  EXPECT_TRUE(prompts["prefixed_chat"].at(0).ends_with("the town.\n\nComplete the sentence: Rome Tower stands in"));
  EXPECT_EQ(prompts["portability_chat"],
            (List{"In which land does Rome Tower stand?", "Complete the sentence: Rome Tower's king is"}));
  prompts.clear();
  for (const auto& one : detail::asked_texts(some_facts(), 1, 2, true, true))
    prompts[one.group()].push_back(one.prompt);
  EXPECT_EQ(prompts["edit_chat"], List{"New Fact: Who built Rome Tower? Oslo\nWho built Rome Tower?"});
  EXPECT_FALSE(prompts.contains("question_chat")) << "the prompt is one";
  EXPECT_FALSE(prompts.contains("negation_chat") || prompts.contains("doubt_chat")) << "a question claims nothing";
  prompts.clear();
  for (const auto& one : detail::asked_texts(some_facts(), 0, 1, false, true))
    prompts[one.group()].push_back(one.prompt);
  EXPECT_EQ(prompts["portability"].at(0),
            "New Fact: Rome Tower stands in Oslo\nPrompt: Question: In which land does Rome Tower stand?\nAnswer:");
  EXPECT_EQ(prompts["question"].at(0),
            "New Fact: Rome Tower stands in Oslo\nPrompt: Question: Rome Tower stands in what?\nAnswer:");
}

// The statement of a hop, in a chat its question; where the data have only the other, that one.
TEST(MetricsFree, HopsAreAskedWithWhatTheyHave) {
  auto facts = some_facts();
  auto& group = facts.groups.emplace_back();
  group.kind = "mquake";
  group.facts = {0};
  group.questions = {""};
  group.new_answers = {"Harald"};
  group.new_single_hops = {{"Where is it?", "", {"Oslo"}}, {"", "It stands in", {"Oslo"}}, {"", "", {"Oslo"}}};
  for (const bool chat : {false, true}) {
    std::vector<std::string> prompts;
    for (const auto& one : detail::asked_texts(facts, 0, 1, chat, false))
      if (one.kind == "hop" || one.kind == "multi_hop") prompts.push_back(one.prompt);
    EXPECT_EQ(prompts, chat ? (std::vector<std::string>{"Where is it?", "Complete the sentence: It stands in"})
                            : (std::vector<std::string>{"Question: Where is it?\nAnswer:", "It stands in"}));
  }
}

TEST(MetricsFree, StandInsHaveOneArticle) {
  datasets::Fact fact;
  fact.subject = "Rome Tower";
  fact.prompt = "Who built the {}?";
  for (fact.case_id = 0; fact.case_id < 7; ++fact.case_id)
    for (const auto& prompt : detail::neighbors_of(fact, {})) {
      EXPECT_TRUE(prompt.starts_with("Who built the ")) << prompt;
      EXPECT_EQ(prompt.find("the the"), std::string::npos) << prompt;
    }
}

// Of what an edit changes nothing is kept: no subject of the set stands in for a neighbour.
TEST(MetricsFree, StandInsAreNotEdited) {
  datasets::FactSet set;
  for (const char* subject : {"marie Curie", "The Beatles", "Norway", "Mount Everest", "Agatha Christie"}) {
    set.facts.emplace_back().subject = subject;
    set.facts.back().prompt = "Who built {}?";
  }
  const auto edited = detail::edited_subjects(set);
  for (auto& fact : set.facts)
    for (fact.case_id = 0; fact.case_id < 7; ++fact.case_id) {
      const auto prompts = detail::neighbors_of(fact, edited);
      EXPECT_EQ(prompts.size(), 3U);
      for (const auto& prompt : prompts)
        for (const char* subject : {"Curie", "Beatles", "Norway", "Everest", "Christie"})
          EXPECT_EQ(prompt.find(subject), std::string::npos) << prompt;
    }
}

// Not true is what the last sentence says, and it has to be about the subject.
TEST(MetricsFree, TheLastSentenceIsDenied) {
  const auto denied = [](const std::string& prompt) {
    datasets::FactSet set;
    set.facts.emplace_back().subject = "Rome Tower";
    set.facts.back().prompt = prompt;
    std::string all;
    for (const auto& one : detail::asked_texts(set, 0, 1, false, false))
      if (one.kind == "negation" || one.kind == "doubt") all += one.prompt + "|";
    return all;
  };
  EXPECT_EQ(denied("{} stands in"), "It is not true that Rome Tower stands in|I doubt that Rome Tower stands in|");
  EXPECT_EQ(denied("Water boils. {} stands in"),
            "Water boils. It is not true that Rome Tower stands in|Water boils. I doubt that Rome Tower stands in|");
  EXPECT_EQ(denied("Where does {} stand? It is in"), "");
}

TEST(MetricsFree, EachStyleHasTextsAndFiguresOfItsOwn) {
  const auto model = chat_model();
  const auto facts = some_facts();
  const auto plain = evaluated(model, facts, "plain"), chat = evaluated(model, facts, "chat"),
             both = evaluated(model, facts, "both");
  for (const auto& [key, value] : plain.summary["free"].items()) EXPECT_FALSE(key.ends_with("_chat")) << key;
  EXPECT_EQ(EvaluateOptions().free_style, "plain");
  for (const auto& group : groups_of(chat.cases[0]["free"])) EXPECT_TRUE(group.ends_with("_chat")) << group;
  json expected = plain.cases[0]["free"];
  expected.update(chat.cases[0]["free"]);
  EXPECT_EQ(both.cases[0]["free"], expected);
  for (const char* key : {"edit_names_chat", "paraphrase_begins_chat", "question_names_chat", "portability_names_chat",
                          "negation_names_chat", "loops_chat", "entropy_chat"}) {
    EXPECT_TRUE(chat.summary["free"][key].is_number()) << key;
    EXPECT_EQ(both.summary["free"][key], chat.summary["free"][key]) << key;
  }
  EXPECT_TRUE(chat.summary["free"]["edit_begins"].is_null());
  EXPECT_TRUE(plain.summary["free"]["portability_names"].is_number());
  EXPECT_TRUE(chat.summary["free"]["retrieval"]["edit_names_chat"].is_number());
  EXPECT_TRUE(plain.summary["free"]["retrieval"]["neighborhood_first_token_kept"].is_number());
}

TEST(MetricsFree, AnswersAreWhatTheModelWritesInItsTemplate) {
  const auto model = chat_model();
  const auto evaluation = evaluated(model, some_facts(), "chat");
  models::GenerateOptions generate;
  generate.max_new_tokens = 40;
  generate.stop_ids = model.tokenizer().eos_ids();
  size_t texts = 0;
  for (const auto& fact : evaluation.cases)
    for (const auto& [group, list] : fact["free"].items())
      for (const auto& entry : list) {
        const std::string chat = "<|user|>\n" + entry["prompt"].get<std::string>() + "<|end|>\n<|assistant|>\n";
        const auto ids = models::generate(model, {model.tokenizer().encode_ids(chat, false)}, generate);
        EXPECT_EQ(entry["text"], model.tokenizer().decode(ids[0], true)) << group;
        ++texts;
      }
  EXPECT_EQ(texts, 10U + 5U) << "of the second, a question, no negations";
}

// An answer is right if it is what the model has written, and no neighbour has changed of the same model.
TEST(MetricsFree, ReadsAnswersOfFactsProbesAndHops) {
  const auto model = chat_model();
  auto facts = some_facts();
  datasets::FactGroup group;
  group.kind = "mquake";
  group.facts = {0, 1};
  group.questions = {"Who is king where Rome Tower stands?"};
  group.new_answers = {"Harald"};
  group.new_single_hops = {{"Where does it stand?", "It stands in", {"Oslo"}}};
  facts.groups = {group};
  const auto first = evaluated(model, facts, "both");
  const json& raw = first.cases[0]["free"];
  for (const char* key : {"edit_names_chat", "portability_names", "hop_names", "hop_names_chat", "multi_hop_names"})
    EXPECT_EQ(first.summary["free"][key], 0) << key;
  EXPECT_EQ(raw["hop"][0]["prompt"], "It stands in");
  EXPECT_EQ(raw["hop_chat"][0]["prompt"], "Where does it stand?");
  EXPECT_EQ(raw["multi_hop"][0]["prompt"], "Question: Who is king where Rome Tower stands?\nAnswer:");
  EXPECT_EQ(raw["multi_hop_chat"][0]["prompt"], "Who is king where Rome Tower stands?");

  const auto written = [&](const char* kind) { return raw[kind][0]["text"].get<std::string>(); };
  for (const char* kind : {"edit_chat", "portability", "hop", "multi_hop_chat"})
    ASSERT_FALSE(plain_words(written(kind)).empty()) << kind;
  facts.facts[0].target_new = written("edit_chat");
  facts.facts[0].portability["kind"][0].answers = {"nothing", written("portability")};
  facts.groups[0].new_single_hops[0].answers = {written("hop")};
  facts.groups[0].new_answers = {written("multi_hop_chat")};
  const auto second = evaluated(model, facts, "both", &first);
  const json& now = second.cases[0]["free"];
  EXPECT_EQ(now["edit_chat"][0]["names"], true);
  EXPECT_EQ(now["edit_chat"][0]["begins"], true);
  EXPECT_EQ(second.summary["free"]["edit_names_chat"], 50) << "one of two facts";
  EXPECT_EQ(second.summary["free"]["portability_names"], 50) << "one of two questions";
  EXPECT_EQ(second.summary["free"]["hop_names"], 100);
  EXPECT_EQ(second.summary["free"]["multi_hop_names_chat"], 100);
  EXPECT_EQ(second.summary["free"]["neighborhood_text_kept_chat"], 100);
  EXPECT_FALSE(first.summary["free"].contains("neighborhood_text_kept_chat")) << "nothing to compare with";
  EvaluateOptions one;
  one.free_limit = 1;
  const auto limited = evaluate(model, facts, {"free"}, one);
  EXPECT_FALSE(limited.cases[0]["free"].contains("hop")) << "an instance of which only a part is read";
  EXPECT_EQ(limited.summary["free"]["n"], 1);
  EXPECT_EQ(limited.summary["free"]["retrieval"]["n"], 1);
}

// A table of 256 positions: the first token needs none of its own.
TEST(MetricsFree, TextsAreShorterWhereTheModelHasNoPositionsLeft) {
  const models::Model model = testing::tiny_model({.family = "gpt2"});
  const std::string longest(250, 'a');
  const std::vector<std::string> prompts = {longest, "b", "c"};
  const evaluation::FreeTextOptions options = {.max_tokens = 20, .whole_sentence = false};
  const auto texts = evaluation::write_on(model, prompts, options);
  const size_t left = 256 + 1 - model.tokenizer().encode_prompt(longest).ids.size();
  ASSERT_LT(left, 20U);
  EXPECT_LE(texts[0].ids.size(), left);
  for (size_t i : {1, 2})
    EXPECT_EQ(texts[i].ids, evaluation::write_on(model, {prompts[i]}, options)[0].ids) << "as alone";
  EXPECT_THROW((void)evaluation::write_on(model, {std::string(300, 'a')}, options), Error);
}

// The date that some templates write is a part of what is asked.
TEST(MetricsFree, WhatIsRememberedOfAChatIsOfTheSameDay) {
  const auto in_zone = [](const char* zone) {
    ::setenv("TZ", zone, 1);
    ::tzset();
  };
  const std::string own = std::getenv("TZ") ? std::getenv("TZ") : "";
  const testing::TemporaryFolder cache("metrics-free-cache");
  const auto model = chat_model(true, "{{ strftime_now('%Z') }}");
  auto facts = some_facts();
  facts.facts.pop_back();
  const auto remembered = [&](const std::string& style) {
    EvaluateOptions options;
    options.free_style = style;
    bool cached = false;
    (void)evaluate_before(model, facts, {"free"}, options, cache.path(), &cached);
    return cached;
  };
  in_zone("AAA0");
  (void)remembered("plain");
  EXPECT_FALSE(remembered("chat"));
  EXPECT_TRUE(remembered("chat"));
  in_zone("BBB0");
  EXPECT_FALSE(remembered("chat"));
  EXPECT_TRUE(remembered("plain")) << "texts have no template";
  ::unsetenv("TZ");
  if (!own.empty()) ::setenv("TZ", own.c_str(), 1);
  ::tzset();
}

TEST(MetricsFree, AChatNeedsATemplateAndAStyleAName) {
  const auto bare = chat_model(false);
  for (const char* style : {"chat", "both"}) {
    const auto told = testing::error_of([&] { (void)evaluated(bare, some_facts(), style); }, ErrorClass::kUnsupported);
    EXPECT_NE(told.find("without a chat template"), std::string::npos) << style << ": " << told;
  }
  EXPECT_NO_THROW((void)evaluated(bare, some_facts(), "plain"));
  const auto told =
      testing::error_of([&] { (void)evaluated(bare, some_facts(), "chatty"); }, ErrorClass::kInvalidArgument);
  EXPECT_NE(told.find("did you mean \"chat\"?"), std::string::npos) << told;
}

}  // namespace metrics_free_test
}  // namespace emend::evaluation
