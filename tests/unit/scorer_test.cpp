// How answers are scored.
#include <ATen/core/grad_mode.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/direct/scorer.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/error_of.h"
#include "support/tiny_tokenizer.h"

namespace emend {
namespace scorer_test {

using testing::error_of;
using testing::TemporaryFolder;
using workflow::ContrastPrompt;

models::Model tiny() {
  return testing::tiny_model({});
}

TEST(Scorer, CountsWholeWordsAndPhrases) {
  const std::vector<std::string> texts = {"Delve, delve into the rich tapestry!", "No such thing here."};
  EXPECT_NEAR((workflow::Scorer{"s", "rate", {"delve", "rich tapestry", "thin"}}.score({texts})), 100.0 * 3 / 10, 1e-9);
  EXPECT_EQ((workflow::Scorer{"s", "any", {"DELVE"}}.score({texts})), 50);
  EXPECT_EQ((workflow::Scorer{"s", "rate", {"fast-paced", "fast paced", "Fast\u2011paced"}}.score({{"fast-paced"}})),
            50)
      << "one word in three spellings";
  EXPECT_EQ((workflow::Scorer{"s", "any", {"école", "ПРИВЕТ"}}.score({{"École", "Ah, привет!", "ecole"}})),
            100.0 * 2 / 3);
  EXPECT_EQ((workflow::Scorer{"s", "length", {}}.score({texts})), 5);
  EXPECT_EQ((workflow::Scorer{"s", "rate", {"delve"}}.score({{""}})), 0);
  const std::string round = "so it goes so it goes so it goes so it goes";
  EXPECT_EQ((workflow::Scorer{"s", "loops"}.score({{round, texts[0]}})), 50);
  EXPECT_LT((workflow::Scorer{"s", "entropy"}.score({{round}})), (workflow::Scorer{"s", "entropy"}.score({texts})));
}

workflow::Scorer scorer_of(const nlohmann::json& object) {
  return workflow::scorer_of(object, "s.json");
}

TEST(Scorer, SentimentIsPositiveLessNegativeWords) {
  const auto scorer =
      scorer_of({{"name", "mood"}, {"kind", "sentiment"}, {"positive", {"good", "very nice"}}, {"negative", {"bad"}}});
  EXPECT_NEAR(scorer.score({{"Good, good and bad.", "It is very nice here!"}}), 100.0 * 2 / 9, 1e-9);
  EXPECT_NEAR(scorer.score({{"bad"}}), -100, 1e-9);
  const workflow::Scorer twice{"mood", "sentiment", {"good", "Good"}, {"bad"}};
  EXPECT_EQ(twice.score({{"good bad"}}), 0);
}

// Against probabilities of whole texts, computed here.
TEST(Scorer, NextAndJudgeAskTheModel) {
  const at::NoGradGuard no_grad;
  const auto model = tiny();
  const auto probability = [&](const std::string& prompt, const std::string& word) {
    auto ids = model.tokenizer().encode_ids(prompt, true);
    double sum = 0;
    for (const int64_t id : model.tokenizer().encode_ids(word, false)) {
      sum += model.forward(models::TokenBatch::from_rows({ids})).logits[-1].log_softmax(-1)[id].item<double>();
      ids.push_back(id);
    }
    return std::exp(sum);
  };
  const std::vector<ContrastPrompt> prompts = {{"Is it?"}, {"Well then"}};
  const auto next = scorer_of({{"name", "a"}, {"kind", "next"}, {"words", {"x", "x y", "no", "q"}}});
  double wanted = 0;  // "x y" begins with "x": counted once
  for (const auto& prompt : prompts)
    for (const char* word : {"x", " x", "no", " no", "q", " q"}) wanted += 50 * probability(prompt.prompt, word);
  EXPECT_NEAR(next.score({{"", ""}, prompts, &model}), wanted, 1e-5 * wanted);
  EXPECT_TRUE(next.reads_model());
  const auto judge = scorer_of(
      {{"name", "j"}, {"kind", "judge"}, {"ask", "{prompt} - {answer}: good?"}, {"yes", {"y"}}, {"no", {"n"}}});
  wanted = 0;
  const std::vector<std::string> answers = {"{prompt} of course", "no"};
  for (size_t i = 0; i < 2; ++i) {
    const std::string asked = prompts[i].prompt + " - " + answers[i] + ": good?";
    const double yes = probability(asked, "y") + probability(asked, " y"),
                 no = probability(asked, "n") + probability(asked, " n");
    wanted += 50 * yes / (yes + no);
  }
  EXPECT_NEAR(judge.score({answers, prompts, &model}), wanted, 1e-4 * wanted);
}

TEST(Scorer, ACommandGivesANumberAnAnswer) {
  const auto with = [](const std::string& script) {
    return scorer_of({{"name", "c"}, {"kind", "command"}, {"command", {"/bin/sh", "-c", script}}});
  };
  const workflow::Answers answers{{"one", "t\"w\no\xff", "three"}, {{"p"}, {"q"}, {"r"}}};
  EXPECT_EQ(with("while read line; do echo 2.5; done").score(answers), 2.5);
  EXPECT_EQ(with(R"(while read -r l; do case "$l" in '{"answer":"one","prompt":"p"}') echo 9;; *) echo 0;; esac; done)")
                .score(answers),
            3);
  const auto refused = [&](const workflow::Scorer& scorer, ErrorClass error_class, const std::string& word) {
    EXPECT_NE(error_of([&] { (void)scorer.score(answers); }, error_class).find(word), std::string::npos);
  };
  refused(with("echo 1"), ErrorClass::kCorruption, "1 line");
  refused(with("echo 1; echo two; echo 3"), ErrorClass::kCorruption, "\"two\" in line 2");
  refused(with("echo 1; echo nan; echo 3"), ErrorClass::kCorruption, "nan");
  refused(with("exit 4"), ErrorClass::kCorruption, "status 4");
  refused(with("kill -9 $$"), ErrorClass::kCorruption, "signal 9");
  auto missing = with("");
  missing.words = {"/no/such/program"};
  refused(missing, ErrorClass::kNotFound, "/no/such/program");
}

TEST(Scorer, FilesAreChecked) {
  const TemporaryFolder folder("scorer_files");
  const auto refused = [&](const std::string& text) {
    write_file(folder / "s.json", text);
    return error_of([&] { (void)workflow::read_scorer(folder / "s.json"); }, ErrorClass::kCorruption);
  };
  EXPECT_NE(refused(R"({"kind": "length"})").find("name"), std::string::npos);
  EXPECT_NE(refused(R"({"name": "a", "kind": "smell", "words": ["x"]})").find("smell"), std::string::npos);
  EXPECT_NE(refused(R"({"name": "a"})").find("no words"), std::string::npos);
  EXPECT_NE(refused(R"({"name": "a", "kind": "length", "words": ["x"]})").find("nothing more"), std::string::npos);
  EXPECT_NE(refused(R"({"name": "a", "kind": "sentiment", "positive": ["x"]})").find("no negative"), std::string::npos);
  EXPECT_NE(refused(R"({"name": "a", "kind": "judge", "ask": "good?"})").find("{answer}"), std::string::npos);
  EXPECT_NE(refused(R"({"name": "a", "kind": "command"})").find("no command"), std::string::npos);
  for (const char* word : {"!", "\u2026", "\u201c\u201d", "' '", ""}) {
    const std::string quoted = nlohmann::json(word).dump();
    for (const char* kind : {"rate", "any"})
      EXPECT_NE(refused(R"({"name": "a", "kind": ")" + std::string(kind) + R"(", "words": ["x", )" + quoted + "]}")
                    .find("without a letter"),
                std::string::npos)
          << word;
    EXPECT_NE(refused(R"({"name": "a", "kind": "sentiment", "positive": ["x"], "negative": [)" + quoted + "]}")
                  .find("without a letter"),
              std::string::npos)
        << word;
  }
  (void)refused(R"({"name": "a", "kind": "next", "words": [" "]})");
  EXPECT_EQ(scorer_of({{"name", "a"}, {"kind", "next"}, {"words", {"!"}}}).words.size(), 1U)
      << "a token like any other";
  for (const char* text : {"[1]", R"({"name": 3})", R"({"name": "a", "words": 3})", R"({"name": "a", "words": [3]})",
                           R"({"name": "a", "kind": "judge", "ask": 3})"})
    EXPECT_EQ(refused(text).find("json.exception"), std::string::npos) << text;
}

// What typographers and writers of Chinese and Japanese set between words does not hide them.
TEST(Scorer, MarksOfAnyKindStandBetweenWords) {
  const workflow::Scorer any{"s", "any", {"delve"}}, length{"s", "length"};
  for (const char* mark :
       {" ",      ".",      "\u201c", "\u201d", "\u201e", "\u00ab", "\u00bb",  "\u2010", "\u2011", "\u2013",
        "\u2014", "\u2026", "\u00a0", "\u202f", "\u3000", "\u3001", "\u3002",  "\u300c", "\u301c", "\uff01",
        "\uff08", "\u00bf", "\u2022", "\uff5e", " '",     "' ",     " \u2018", "\u2019 "}) {
    const std::string text = std::string("so") + mark + "Delve" + mark + "it";
    EXPECT_EQ(any.score({{text}}), 100) << text;
    EXPECT_EQ(length.score({{text}}), 3) << text;
    EXPECT_TRUE(any.counts("so" + std::string(mark) + "delve" + mark + " ")) << text;
  }
  for (const char* letter : {"\u00e9", "\u3042", "\u4eba", "\u3005", "'s", "\u2019s"})
    EXPECT_EQ(any.score({{std::string("delve") + letter}}), 0) << letter;
  for (const char* form : {"don't", "don\u2019t", "don\u2018t", "DON\uff07T"})
    for (const char* word : {"don't", "don\u2019t"})
      EXPECT_EQ((workflow::Scorer{"s", "rate", {word}}.score({{form}})), 100) << form << " " << word;
  EXPECT_EQ((workflow::Scorer{"s", "any", {"fast-paced"}}.score({{"a fast\u2011paced life"}})), 100);
  EXPECT_EQ((workflow::Scorer{"s", "any", {"\u201cdelve\u201d"}}.score({{"delve"}})), 100);
  for (const char* open : {"so delve\u2019", "so delve\xE2\x80", "so delve\xE2", "so delve\xEF\xBF\xBD"})
    EXPECT_FALSE(any.counts(open)) << "may go on as another word";
  for (const char* broken : {"\xE2\x80", "\xE2", "\xC2", "\xF0\x9F", "\xFF\x80\xE3\x80"})
    EXPECT_EQ(length.score({{std::string("a ") + broken}}), 2);
}

// A tokenizer that writes a blank before a text that stands alone (SentencePiece): behind a newline there is none.
TEST(Scorer, NextReadsTheTokenBehindANewline) {
  const at::NoGradGuard no_grad;
  nlohmann::json config = testing::debug_config("llama");
  config["vocab_size"] = 300;
  const auto metaspace = [] {
    return testing::make_tokenizer(testing::metaspace_json("YesnoIit?:", {{"Y", "es"}, {"e", "s"}, {"\u2581", "Yes"}}));
  };
  const auto model = models::load_model(models::with_tokenizer(models::random_checkpoint(config, 5), metaspace));
  const auto& tokenizer = model.tokenizer();
  const int64_t plain = tokenizer.token_id("Yes").value(), spaced = tokenizer.token_id("\u2581Yes").value();
  ASSERT_EQ(tokenizer.encode_ids("Yes", false), std::vector<int64_t>{spaced});
  const auto next = workflow::scorer_of({{"name", "a"}, {"kind", "next"}, {"words", {"Yes"}}}, "s.json");
  for (const char* asked : {"Is it?\n", "Is it?", "I:\nit\n"}) {
    const std::vector<ContrastPrompt> prompts = {{asked}, {"no"}};
    double wanted = 0;
    for (const auto& prompt : prompts) {
      const auto rows = models::TokenBatch::from_rows(workflow::prompt_rows(model, std::span(&prompt, 1), true));
      const at::Tensor p = model.forward(rows).logits[-1].softmax(-1);
      wanted += 50 * (p[plain].item<double>() + p[spaced].item<double>());
    }
    EXPECT_NEAR(next.score({{"", ""}, prompts, &model}), wanted, 1e-5 * wanted) << asked;
  }
}

}  // namespace scorer_test
}  // namespace emend
