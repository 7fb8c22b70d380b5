// What the edited model writes of facts: other wordings, names like a subject's, other questions.
#include <ATen/ATen.h>
#include <emend/editors/steps/wordings.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include <cctype>

#include "support/editor_models.h"

namespace emend {
namespace wordings_test {

TEST(Wordings, AreWhatStandsBetweenLineAndAnswer) {
  datasets::Fact fact;
  fact.prompt = "{} is a citizen of";
  fact.subject = "Marie Curie";
  fact.target_new = "Norway";
  EXPECT_EQ(editors::wording_of(" Marie Curie comes from Norway.\nIn Norway", fact), "{} comes from");
  EXPECT_EQ(editors::wording_of("The home of Marie Curie was Norway", fact), "The home of {} was");
  for (const char* text :
       {"", "Marie Curie", "Norway is where Marie Curie is from", "Norway knows Marie Curie of Norway",
        "She comes from Norway", "Marie Curie Norway", "Marie Curie {} Norway", "Marie Curie\ncomes from Norway",
        "Marie Curies come from Norway", "AnneMarie Curie comes from Norway", "Marie Curie comes from Norwayland"})
    EXPECT_EQ(editors::wording_of(text, fact), "") << text;
}

// A model without sense writes none; one whose window is too small for the request is not asked.
TEST(Wordings, AreNotAskedOfAModelTheyDoNotFit) {
  const auto facts = testing::tiny_facts();
  const auto wordings = editors::other_wordings(testing::tiny_model(), facts, {});
  ASSERT_EQ(wordings.size(), facts.size());
  for (const auto& of_fact : wordings) EXPECT_TRUE(of_fact.empty());
}

// Those whose distribution of next tokens shares less than half with that of each own prompt.
TEST(OtherQuestions, AreNotTheFactsOwn) {
  const models::Model model = testing::tiny_model();
  const std::string subject = "Oslo";
  const auto next = [&](const std::string& text) {
    const auto batch = models::TokenBatch::from_rows({model.tokenizer().encode_ids(text)});
    return at::softmax(model.forward(batch).logits.select(0, -1).to(at::kDouble), 0);
  };
  const auto ask = [&](const std::vector<std::string>& own, int64_t count) {
    std::vector<std::vector<int64_t>> ids;
    for (const auto& prompt : own) ids.push_back(model.tokenizer().encode_ids(prompt));
    return editors::other_questions(model, std::vector{subject}, {ids}, count, {})[0];
  };
  const auto filled = [&](std::string question) { return question.replace(question.find("{}"), 2, subject); };
  const std::string own = "Oslo lies in";
  const auto found = ask({own}, 7);
  ASSERT_GE(found.size(), 2U);
  for (const auto& question : found) {
    const at::Tensor other = next(filled(question));
    EXPECT_LT(at::minimum(next(own), other).sum().item<double>(), 0.5) << question;
    for (const auto& left : ask({own, filled(question)}, 7))
      EXPECT_LT(at::minimum(other, next(filled(left))).sum().item<double>(), 0.5) << left << " beside " << question;
  }
  EXPECT_EQ(ask({own}, 1), std::vector(found.begin(), found.begin() + 1));
  EXPECT_TRUE(ask({own}, 0).empty());
  EXPECT_TRUE(editors::other_questions(model, std::vector{std::string(300, 'a')}, {{{1}}}, 7, {})[0].empty());
}

TEST(Lookalikes, AreTheNamesOfAList) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(editors::names_of(" Airbus A350, Airbus A380, Airbus A350,Airbus A3", "Airbus A340"),
            (Names{"Airbus A350", "Airbus A380"}))
      << "once each; the last one may be cut off";
  EXPECT_EQ(editors::names_of(" Le Devoir, the Le Devoir group, {}, , Le Monde, La", "Le Devoir"), Names{"Le Monde"});
  EXPECT_EQ(editors::names_of("", "Le Devoir"), Names());
  EXPECT_EQ(editors::names_of(" Anna, Ann Arbor, Joann, ", "Ann"), (Names{"Anna", "Joann"})) << "words of their own";
  EXPECT_EQ(editors::names_of(" Joé, Jo Ann, ", "Jo"), Names{"Joé"}) << "an accented letter is a letter";
}

TEST(Lookalikes, EndAsTheSubjectDoes) {
  using Names = std::vector<std::string>;
  const Names airports = {"Osaka Castle", "Miami Airport", "Naples Port", "Osaka Bay"};
  EXPECT_EQ(editors::namesakes("Naples International Airport", airports),
            (Names{"Osaka Airport", "Osaka International Airport", "Naples Osaka Airport",
                   "Miami International Airport", "Naples Miami Airport", "Naples Port Airport"}))
      << "once each, not what is a name already";
  EXPECT_EQ(editors::namesakes("Anna Lindh", Names{"Jan van Eyck"}), (Names{"Jan Lindh", "Jan van Lindh"}));
  EXPECT_EQ(editors::namesakes("Republic of Florence", Names{"Kingdom of Naples"}),
            (Names{"Kingdom Florence", "Kingdom of Florence", "Republic Kingdom Florence"}));
  EXPECT_EQ(editors::namesakes("Web Ball Form Server", Names{"Google", "Apple"}),
            (Names{"Google Server", "Google Form Server", "Web Google Server", "Web Google Form Server", "Apple Server",
                   "Apple Form Server", "Web Apple Server", "Web Ball Apple Server"}))
      << "one word in the middle after the other is another";
  EXPECT_EQ(
      editors::namesakes("Web Ball Form Server", Names{"Web Ball Portal", "Web Ball", "Web Server", "Web Ball Form X"}),
      (Names{"Web Ball Portal Server"}))
      << "up to where they part, if that is in the middle";
  EXPECT_EQ(editors::namesakes("Anna Lindh", Names{"Anna Berg"}), Names()) << "there is no middle";
  EXPECT_EQ(editors::namesakes("Janakkala", Names{"Helsinki", "Rome", "Åbobyen Nord", "Janaland"}),
            (Names{"Helskkala", "Åbokkala"}))
      << "halves of words of six letters or more that begin otherwise";
  EXPECT_EQ(editors::namesakes("Kiruna", Names()), Names());
  EXPECT_EQ(editors::namesakes("Rome", Names{"Helsinki"}), Names()) << "a short word";
  EXPECT_EQ(editors::namesakes("Anna Lindh", Names()), Names());
  EXPECT_EQ(editors::namesakes("Airbus A9", Names{"Airbus A2"}), (Names{"Airbus A0", "Airbus A5", "Airbus A7"}))
      << "numbers beside its own";
  EXPECT_EQ(editors::namesakes("My name", Names()),
            (Names{"Your name", "His name", "Her name", "Our name", "Their name"}))
      << "what is somebody's is somebody else's, too";
}

TEST(Lookalikes, TextsBeginWithOtherWords) {
  const models::Model model = testing::tiny_model();
  const auto& tokenizer = model.tokenizer();
  const std::vector<std::vector<int64_t>> rows = {tokenizer.encode("The Tower The tower Is THE 4 Rome").ids,
                                                  tokenizer.encode("A Rome B The").ids};
  for (const auto& word : editors::without(editors::words_that_begin(tokenizer, rows), "Rome")) {
    EXPECT_EQ(tokenizer.encode(word).size(), 1U) << word;
    EXPECT_TRUE(word != "Rome" && word.size() > 1 && std::isupper(static_cast<unsigned char>(word[0]))) << word;
  }
}

TEST(Lookalikes, AreNotAskedOfAModelTheyDoNotFit) {
  const std::vector<std::string> subjects = {"Airbus A340", "Le Devoir"};
  const auto names = editors::lookalikes(testing::tiny_model(), subjects, {});
  ASSERT_EQ(names.size(), 2U);
  EXPECT_TRUE(names[0].empty() && names[1].empty());
}

}  // namespace wordings_test
}  // namespace emend
