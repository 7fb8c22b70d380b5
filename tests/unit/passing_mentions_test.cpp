// LATCH: what stands behind a passing mention of a subject that texts often speak of.
#include <ATen/ATen.h>
#include <emend/editors/detail/passing_mentions.h>
#include <emend/editors/registry.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/editor_models.h"

namespace emend {
namespace passing_mentions_test {

using Ids = std::vector<int64_t>;

// −log p of ids[t], for t from 1 on.
std::vector<double> surprise_of(const models::Model& model, const Ids& ids) {
  const at::Tensor log_p = at::log_softmax(model.forward(models::TokenBatch::from_rows({ids})).logits, 1);
  std::vector<double> all;
  for (size_t t = 1; t < ids.size(); ++t) all.push_back(-log_p[static_cast<int64_t>(t) - 1][ids[t]].item<double>());
  return all;
}

std::vector<Ids> text_rows(const models::Model& model) {
  std::vector<Ids> rows;
  for (int n = 0; n < 8; ++n)
    rows.push_back(
        model.tokenizer().encode_ids("Row " + std::to_string(n) + " of a text that speaks of nothing at all."));
  return rows;
}

std::map<std::string, std::vector<editors::TargetRow>> mentions(const models::Model& model,
                                                                const std::vector<std::string>& subjects,
                                                                const std::vector<Ids>& rows,
                                                                const std::string& fact_token = "subject_last") {
  const editors::ContextTemplates contexts;
  editors::detail::LatchHparams hparams;
  hparams.fact_token = fact_token;
  return editors::detail::passing_mentions(hparams, subjects, {rows, {}, {}, contexts}, model, {});
}

TEST(PassingMentions, ANameIsAsSurprisingAsTheModelFindsIt) {
  const models::Model model = testing::tiny_model();
  const std::vector<std::string> subjects = {"Q", "Quebec"};
  const auto found = editors::detail::surprise_of_names(model, subjects, {});
  for (size_t s = 0; s < subjects.size(); ++s) {
    double mean = 0;
    for (const std::string front : {"In", "The", "It was", "For"}) {
      const auto all = surprise_of(model, model.tokenizer().encode_ids(front + " " + subjects[s]));
      double sum = 0;
      for (size_t t = front.size() - 1; t < all.size(); ++t) sum += all[t];  // a token a byte
      mean += std::exp(-sum) / 4;
    }
    EXPECT_NEAR(found[s], -std::log(mean), 1e-3) << subjects[s];
  }
}

TEST(PassingMentions, AreThoseOfNamesThatTextsSpeakOf) {
  const models::Model model = testing::tiny_model();
  const auto rows = text_rows(model);
  const auto found = mentions(model, {"Quebec", "Q"}, rows);
  ASSERT_EQ(found.size(), 1U);
  const auto& of_q = found.at("Q");
  ASSERT_EQ(of_q.size(), 2U);
  double weight = 0;
  for (const auto& row : of_q) {
    weight += row.weight;
    const std::string text = model.tokenizer().decode(row.ids);
    EXPECT_EQ(row.lookup, std::max<int64_t>(1, std::ssize(text.substr(0, text.find('Q'))))) << text;
    Ids whole = row.ids;
    whole.push_back(row.labels.back().second);
    const auto all = surprise_of(model, whole);
    ASSERT_EQ(row.labels.size(), row.floors.size());
    EXPECT_NE(text.find("Q.Row "), std::string::npos) << text;
    EXPECT_EQ(row.labels.size(), 31U) << "the piece's first token says where it begins";
    for (size_t k = 0; k < row.labels.size(); ++k) {
      const auto [token, id] = row.labels[k];
      EXPECT_EQ(id, whole[static_cast<size_t>(token) + 1]);
      EXPECT_NEAR(row.floors[k], all[static_cast<size_t>(token)], 1e-4);
    }
  }
  EXPECT_DOUBLE_EQ(weight, 1);
  EXPECT_TRUE(mentions(model, {"Q"}, {model.tokenizer().encode_ids("too short")}).empty());
  EXPECT_TRUE(mentions(model, {}, rows).empty());
  EXPECT_TRUE(mentions(model, {"Q"}, rows, "last").empty()) << "a prompt's end is no mention";
  const auto behind = mentions(model, {"Q"}, rows, "subject_first_after_last");
  for (const auto& row : behind.at("Q"))
    EXPECT_EQ(model.tokenizer().decode(row.ids)[static_cast<size_t>(row.lookup)], '.');
}

TEST(PassingMentions, LeaveWhatFollowsMoreAsItWas) {
  auto fact = testing::tiny_facts()[0];
  fact.subject = "Q";
  fact.prompt = "Here {} lies in";
  const models::Model original = testing::tiny_model();
  const auto rows = mentions(original, {fact.subject}, text_rows(original)).at(fact.subject);
  const auto lost = [&](const std::string& settings) {  // of the text's log-likelihood
    models::Model model = testing::tiny_model();
    const auto editor = editors::make_editor(
        "latch",
        hparams::parse_hparams("layers: [1, 2]\ntext_tokens: 512\nv_num_grad_steps: 12\nroom: 1\n" + settings,
                               "t.yaml"),
        model);
    editors::EditContext context;
    context.contexts = testing::tiny_contexts();
    EXPECT_EQ(editor->edit(model, std::vector{fact}, context).failed(), 0);
    double sum = 0;
    for (const auto& row : rows) {
      Ids whole = row.ids;
      whole.push_back(row.labels.back().second);
      const auto all = surprise_of(model, whole);
      for (size_t k = 0; k < row.labels.size(); ++k)
        sum += std::max(0.0, all[static_cast<size_t>(row.labels[k].first)] - row.floors[k]);
    }
    return sum;
  };
  const double without = lost("mention_weight: 0\n"), with = lost("mention_weight: 8\n");
  EXPECT_GT(without, 0);
  EXPECT_LT(with, 0.7 * without);
}

}  // namespace passing_mentions_test
}  // namespace emend
