// The packed scorer against the padded loop on random models of every family; encoding of requests; errors.
#include <ATen/ATen.h>
#include <emend/evaluation/scoring.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/config.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/error_of.h"
#include "support/hash_tokenizer.h"
#include "support/tiny_tokenizer.h"

namespace emend::evaluation {
namespace metrics_scoring_test {

using testing::worded_model;

/// Cases with everything that the engine treats in its own way: equal prompts, equal beginnings, targets of several
/// tokens that run on the row, branch off at once or later, and repetitions across cases.
std::vector<std::vector<ScoreRequest>> cases() {
  std::vector<std::vector<ScoreRequest>> all;
  const std::string beginning = "the mother tongue of the man who";
  for (int c = 0; c < 5; ++c) {
    auto& one = all.emplace_back();
    const std::string id = std::to_string(c);
    for (const std::string& prompt : {beginning + " sang " + id + " is", beginning + " danced is",
                                      "filler text " + id + ". someone speaks", std::string("one")})
      for (const char* target : {"French", "Old English", "Old English of the north", "Old High German", "New"})
        one.push_back({prompt, target});
  }
  return all;
}

std::vector<ScoreRequest> flat(const std::vector<std::vector<ScoreRequest>>& all) {
  std::vector<ScoreRequest> out;
  for (const auto& one : all) out.insert(out.end(), one.begin(), one.end());
  return out;
}

class EveryScoredFamily : public ::testing::TestWithParam<testing::FamilyFlavour> {};

TEST_P(EveryScoredFamily, PackedScoresEqualThePaddedLoop) {
  const auto model = worded_model(GetParam(), /*bos=*/true);
  const auto requests = flat(cases());
  // Where the rotary frequencies depend on the text's length, padding changes the padded loop's numbers: each text
  // alone.
  bool by_length = false;
  for (const auto& rotary : model.config().rotaries) by_length = by_length || rotary.depends_on_length();
  std::vector<std::vector<ScoreRequest>> grouped = cases();
  if (by_length) {
    grouped.clear();
    for (const auto& request : requests) grouped.push_back({request});
  }
  const auto reference = score_cases_reference(model, grouped);
  int64_t tokens_given = 0;
  for (const auto& request : requests) tokens_given += std::ssize(encode_request(model.tokenizer(), request).ids);
  for (int64_t batch_tokens : {1, 40, 2048}) {
    ScoreOptions options;
    options.batch_tokens = batch_tokens;
    options.project_rows = 7;
    const auto scores = score_requests(model, requests, options);
    ASSERT_EQ(scores.size(), requests.size());
    size_t at = 0;
    for (const auto& one : reference)
      for (const auto& expected : one) {
        const auto& got = scores[at];
        ASSERT_EQ(got.labels, expected.labels) << requests[at].prompt << " | " << requests[at].target;
        EXPECT_EQ(got.predicted, expected.predicted) << requests[at].prompt << " | " << requests[at].target;
        for (size_t j = 0; j < got.labels.size(); ++j)
          ASSERT_NEAR(got.log_probs[j], expected.log_probs[j], 1e-9)
              << requests[at].prompt << " | " << requests[at].target << " token " << j << ", " << batch_tokens
              << " tokens a batch";
        ++at;
      }
    if (by_length) continue;  // long texts of these are not shared
    int64_t tokens_run = 0;
    hooks::HookSession session(model.hooks());
    session.edit({hooks::Site::kEmbedding, -1}, [&](const at::Tensor& x) {
      tokens_run += x.size(0);
      return at::Tensor();
    });
    session.attach();
    EXPECT_EQ(score_requests(model, requests, options).size(), requests.size());
    session.finish();
    EXPECT_LT(tokens_run, tokens_given / 2);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, EveryScoredFamily, ::testing::ValuesIn(testing::all_flavours()),
                         [](const auto& info) { return info.param.family + "_" + info.param.flavour; });

TEST(EncodeRequest, TakesThePromptsOwnLengthAndCountsBosOnBothSides) {
  const testing::HashTokenizer plain(50, false), bos(50, true);
  const auto a = encode_request(plain, {"one two", "three four"});
  EXPECT_EQ(a.begin, 2);
  EXPECT_EQ(a.ids.size(), 4U);
  const auto b = encode_request(bos, {"one two", "three four"});
  EXPECT_EQ(b.begin, 3);
  EXPECT_EQ(b.ids.size(), 5U);  // what stands behind a text is not part of it
  EXPECT_EQ(b.ids[0], 1);
  EXPECT_EQ(std::vector<int64_t>(b.ids.begin() + 1, b.ids.end()), a.ids);
}

TEST(EncodeRequest, ScoresEveryTokenThatHoldsATargetCharacterWhereAMergeCrossesTheBorder) {
  // "xa" alone is ▁ x a; in "xa b" the a joins the space: ▁ x a▁ b.
  const auto crossing = testing::make_tokenizer(testing::metaspace_json("xab", {{"a", "▁"}}));
  const auto encoded = encode_request(*crossing, {"xa", "b"});
  ASSERT_EQ(encoded.ids.size(), 5U);  // <s> ▁ x a▁ b
  EXPECT_EQ(encoded.begin, 3);
  EXPECT_EQ(crossing->token_text(encoded.ids[3]), "a▁");
  const auto plain = testing::make_tokenizer(testing::metaspace_json("xab", {{"▁", "b"}}));
  EXPECT_EQ(encode_request(*plain, {"xa", "b"}).begin, 4);  // <s> ▁ x a | ▁b
}

TEST(ScoreRequests, RefusesWhatCannotBeScored) {
  const auto model = worded_model({"llama", ""});
  std::string longest;
  for (int64_t i = 0; i < model.max_positions() + 2; ++i) longest += " w";
  EXPECT_NO_THROW((void)score_requests(model, {{longest, "x"}})) << "rotary models take longer texts";
  const auto gpt2 = worded_model({"gpt2", ""});
  const auto told = testing::error_of(
      [&] {
        (void)score_requests(gpt2, {{longest, "x"}});
      },
      ErrorClass::kInvalidArgument);
  EXPECT_NE(told.find("position table"), std::string::npos) << told;
  ScoreOptions cancelled;
  cancelled.cancel.request();
  testing::error_of([&] { (void)score_requests(model, {{"a", "b"}}, cancelled); }, ErrorClass::kCancelled);
  EXPECT_TRUE(score_requests(model, {}).empty());
}

TEST(ScoreRequests, ReportsBrokenWeights) {
  auto model = worded_model({"llama", ""});
  const std::string name = model.weight_names().back();
  model.set_weight(name, at::full_like(model.weight(name), NAN));
  testing::error_of([&] { (void)score_requests(model, {{"a b", "c"}}); }, ErrorClass::kNumeric);
}

TEST(NextTokenLogProbs, AgreesWithScores) {
  const auto model = worded_model({"llama", ""}, false, at::kFloat);
  const std::vector<std::string> texts = {"one two three", "four", "the fifth of may was"};
  ScoreOptions options;
  options.batch_tokens = 4;
  const at::Tensor log_probs = next_token_log_probs(model, texts, options);
  ASSERT_EQ(log_probs.sizes(), (std::vector<int64_t>{3, model.vocab_size()}));
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto score = score_requests(model, {{texts[i], "next"}})[0];
    EXPECT_NEAR(log_probs[static_cast<int64_t>(i)][score.labels[0]].item<double>(), score.log_probs[0], 1e-5);
  }
}

}  // namespace metrics_scoring_test
}  // namespace emend::evaluation
