#include <emend/core/error.h>
#include <emend/editors/steps/prompts.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/error_of.h"
#include "support/shared.h"

namespace emend {
namespace editor_prompts_test {

using editors::FactToken;
using editors::render_prompt;
using testing::make_fact;
using testing::tiny_model;

// The byte-level tokenizer: token i is byte i of the text.
TEST(Prompts, LookupByOffsets) {
  const models::Model model = tiny_model();
  const auto& tokenizer = model.tokenizer();
  const auto at = [&](const char* text, const char* subject, FactToken token) {
    return render_prompt(tokenizer, text, subject, token).lookup;
  };
  EXPECT_EQ(at("The home of {} is", "Ada", FactToken::kSubjectLast), 14);
  EXPECT_EQ(at("The home of {} is", "Ada", FactToken::kSubjectFirst), 12);
  EXPECT_EQ(at("The home of {} is", "Ada", FactToken::kSubjectFirstAfterLast), 15);
  EXPECT_EQ(at("The home of {} is", "Ada", FactToken::kLast), 17);
  // Nothing after the subject, and nothing before it.
  EXPECT_EQ(at("We see {}", "Ada", FactToken::kSubjectFirstAfterLast), 9);
  EXPECT_EQ(at("{}'s home", "A", FactToken::kSubjectLast), 0);
  const auto row = render_prompt(tokenizer, "In {}, one", "Ur", FactToken::kSubjectLast);
  EXPECT_EQ(row.text, "In Ur, one");
  EXPECT_EQ(row.subject, (std::pair<int64_t, int64_t>{3, 5}));
  EXPECT_EQ(row.ids.size(), 10U);
}

TEST(Prompts, SubjectsOfSeveralBytesACharacter) {
  const models::Model model = tiny_model();
  // Three characters of three bytes: the last token of the subject is the last byte of its last character.
  const auto row = render_prompt(model.tokenizer(), "{}在", "東京都", FactToken::kSubjectLast);
  EXPECT_EQ(row.subject, (std::pair<int64_t, int64_t>{0, 9}));
  EXPECT_EQ(row.lookup, 8);
}

TEST(Prompts, BosShiftsPositionsAndStaysOutOfTargets) {
  const models::Model model = tiny_model({.bos = true});
  const auto& tokenizer = model.tokenizer();
  ASSERT_EQ(tokenizer.prefix_ids(), std::vector<int64_t>{256});
  const auto row = render_prompt(tokenizer, "{} is", "Ada", FactToken::kSubjectLast);
  EXPECT_EQ(row.ids.front(), 256);
  EXPECT_EQ(row.lookup, 3);
  EXPECT_EQ(row.subject, (std::pair<int64_t, int64_t>{1, 4}));
  EXPECT_EQ(editors::target_token_ids(tokenizer, "Ada is", " in"), (std::vector<int64_t>{' ', 'i', 'n'}));
}

TEST(Prompts, OneLeadingSpaceWhetherOrNotTheTargetHasOne) {
  EXPECT_EQ(editors::with_leading_space("Rome"), " Rome");
  EXPECT_EQ(editors::with_leading_space(" Rome"), " Rome");
}

TEST(Prompts, TargetIsAppendedAsIdsWithoutItsLast) {
  const models::Model model = tiny_model();
  const auto fact =
      editors::render_prompts(model.tokenizer(), make_fact(1, "{} is in", "Oslo", "Rome"), testing::tiny_contexts());
  EXPECT_EQ(fact.target_ids, (std::vector<int64_t>{' ', 'R', 'o', 'm', 'e'}));
  ASSERT_EQ(fact.rows.size(), 3U);
  EXPECT_EQ(fact.rows[0].text, "Oslo is in");
  EXPECT_EQ(fact.rows[1].text, "So it is. Oslo is in");
  ASSERT_EQ(fact.kl_rows.size(), 1U);
  EXPECT_EQ(fact.kl_rows[0].text, "Oslo is a");
  EXPECT_EQ(fact.kl_rows[0].lookup, 3);
  const auto ids = editors::with_target(fact.rows[0], fact.target_ids);
  EXPECT_EQ(ids.size(), fact.rows[0].ids.size() + 4);
  EXPECT_EQ(ids.back(), 'm');
}

TEST(Prompts, SaysWhichFactIsWrong) {
  const models::Model model = tiny_model();
  auto fact = make_fact(12, "no slot", "Oslo", "Rome");
  fact.source = "facts.json";
  fact.line = 4;
  testing::expect_error(ErrorClass::kInvalidArgument, {"facts.json:4"},
                        [&] { (void)editors::render_prompts(model.tokenizer(), fact, testing::tiny_contexts()); });
  testing::expect_error(ErrorClass::kInvalidArgument, {"did you mean \"subject_last\""},
                        [] { (void)editors::parse_fact_token("subject_las"); });
}

TEST(Contexts, ReadAndChecked) {
  const auto nested =
      editors::parse_contexts(nlohmann::json::parse(R"([["{}"], ["A. {}", "B. {}"]])"), "contexts.json");
  EXPECT_EQ(nested.groups.size(), 2U);
  EXPECT_EQ(nested.flat(), (std::vector<std::string>{"{}", "A. {}", "B. {}"}));
  EXPECT_EQ(editors::parse_contexts(nested.to_json(), "again").groups, nested.groups);
  EXPECT_EQ(editors::parse_contexts(nlohmann::json::parse(R"(["{}", "A. {}"])"), "flat").groups.size(), 1U);
  for (const char* bad :
       {"[]", "5", R"(["A. {}"])", R"(["{}", "none"])", R"(["{}", "{} {}"])", R"([["{}"], []])", R"([["{}"], [3]])"})
    EXPECT_THROW((void)editors::parse_contexts(nlohmann::json::parse(bad), "bad"), Error) << bad;
}

TEST(Contexts, SampledFromTheModelWithTheSeed) {
  const models::Model model = tiny_model();
  const auto memit = editors::sample_contexts(model, {{10, 5}}, editors::ContextGrouping::kPlainApart, 3);
  ASSERT_EQ(memit.groups.size(), 2U);
  EXPECT_EQ(memit.groups[0], std::vector<std::string>{"{}"});
  EXPECT_EQ(memit.groups[1].size(), 5U);
  EXPECT_TRUE(memit.sampled);
  for (const auto& text : memit.groups[1]) {
    EXPECT_TRUE(text.ends_with(". {}")) << text;
    EXPECT_EQ(text.find('{'), text.size() - 2) << "braces that the model wrote are gone: " << text;
  }
  EXPECT_TRUE(memit.groups[1][0].starts_with("The"));
  const auto rome = editors::sample_contexts(model, {{5, 10}, {10, 10}}, editors::ContextGrouping::kOneGroup, 3);
  ASSERT_EQ(rome.groups.size(), 1U);
  EXPECT_EQ(rome.size(), 21U);
  EXPECT_EQ(editors::sample_contexts(model, {{10, 5}}, editors::ContextGrouping::kPlainApart, 3).groups, memit.groups);
  EXPECT_NE(editors::sample_contexts(model, {{10, 5}}, editors::ContextGrouping::kPlainApart, 4).groups, memit.groups);
  // Another model, other texts: nothing is kept between models.
  EXPECT_NE(
      editors::sample_contexts(tiny_model({.seed = 2}), {{10, 5}}, editors::ContextGrouping::kPlainApart, 3).groups,
      memit.groups);
}

// SentencePiece writes a lone "▁" before a string that begins with a space and stands alone; in a sentence there is
// none.
TEST(Prompts, LoneSpacePieceIsNoPartOfTheTarget) {
  EMEND_NEEDS_SHARED();
  const auto folder = testing::shared_dir() / "fixtures" / "tokenizers" / "llama2";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "no Llama 2 tokenizer among the fixtures";
  const auto tokenizer = models::load_tokenizer(folder);
  const std::string prompt = "The Eiffel Tower is in the city of";
  const auto ids = editors::target_token_ids(*tokenizer, prompt, " Rome");
  auto joined = tokenizer->encode_ids(prompt, false);
  joined.insert(joined.end(), ids.begin(), ids.end());
  EXPECT_EQ(joined, tokenizer->encode_ids(prompt + " Rome", false));
}

// In every real vocabulary at hand: prompt ids followed by target ids are the ids of the whole sentence.
TEST(Prompts, TargetsContinueThePromptInEveryVocabulary) {
  EMEND_NEEDS_SHARED();
  for (const char* name : {"gpt2", "llama2", "llama3", "smollm2", "qwen2", "gpt_neox", "falcon", "phi3", "chatglm3"}) {
    const auto folder = testing::shared_dir() / "fixtures" / "tokenizers" / name;
    if (!std::filesystem::exists(folder)) continue;
    const auto tokenizer = models::load_tokenizer(folder);
    for (const auto& [prompt, subject, target] :
         {std::tuple("{} was founded in", "Orvell Motors", "Port Vellamo"),
          std::tuple("{}'s mayor was born in", "Nordhaven", "Buenos Aires"),
          std::tuple("{} was built in", "Nordhaven", "1990"), std::tuple("{} is called", "Nordhaven", "罗马")}) {
      const auto row = render_prompt(*tokenizer, prompt, subject, FactToken::kSubjectLast);
      auto joined = row.ids;
      const auto ids = editors::target_token_ids(*tokenizer, row.text, editors::with_leading_space(target));
      joined.insert(joined.end(), ids.begin(), ids.end());
      auto whole = tokenizer->encode_ids(row.text + editors::with_leading_space(target), false);
      whole.insert(whole.begin(), tokenizer->prefix_ids().begin(), tokenizer->prefix_ids().end());
      EXPECT_EQ(joined, whole) << name << ": " << row.text;
      // The looked-up token ends with the subject.
      const auto decoded = tokenizer->decode(std::span(row.ids).subspan(0, static_cast<size_t>(row.lookup) + 1), true);
      EXPECT_TRUE(decoded.ends_with(subject)) << name << ": \"" << decoded << "\"";
    }
  }
}

}  // namespace editor_prompts_test
}  // namespace emend
