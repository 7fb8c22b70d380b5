// Evaluations as a whole on a small random model: the memory of unedited models, generated text, and health.
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/devices/runtime.h>
#include <emend/evaluation/detail/generation.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/health.h>
#include <emend/evaluation/text_metrics.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/hash_tokenizer.h"
#include "support/temporary_folder.h"

namespace emend::evaluation {
namespace evaluation_test {

using nlohmann::json;
using testing::worded_model;
namespace fs = std::filesystem;

datasets::FactSet facts() {
  return datasets::parse_facts(R"([
{"case_id": 3, "requested_rewrite": {"prompt": "{} lies in", "relation_id": "P1", "subject": "The tall tower",
 "target_new": {"str": "Rome", "id": "Q1"}, "target_true": {"str": "Paris", "id": "Q2"}},
 "paraphrase_prompts": ["One sees The tall tower in"], "neighborhood_prompts": ["The old bridge lies in"],
 "attribute_prompts": [], "generation_prompts": ["The tall tower is", "Near The tall tower one"]},
{"case_id": 4, "requested_rewrite": {"prompt": "{} speaks", "relation_id": "P2", "subject": "Ada Brown",
 "target_new": {"str": "Welsh", "id": "Q3"}, "target_true": {"str": "Dutch", "id": "Q4"}},
 "paraphrase_prompts": ["The language of Ada Brown is"], "neighborhood_prompts": ["Tom Black speaks"],
 "attribute_prompts": [], "generation_prompts": ["Ada Brown is known for"]}])",
                               "made up");
}

class EvaluationTest : public ::testing::Test {
 protected:
  [[nodiscard]] size_t stored() const {
    size_t n = 0;
    if (fs::exists(folder_ / "cache" / "evaluations"))
      for (const auto& entry : fs::directory_iterator(folder_ / "cache" / "evaluations")) n += entry.is_regular_file();
    return n;
  }
  /// Evaluates with the cache; says whether it came from there.
  std::pair<Evaluation, bool> before(const models::Model& model, const std::vector<std::string>& names,
                                     const EvaluateOptions& options = {}) const {
    bool cached = false;
    auto evaluation = evaluate_before(model, facts(), names, options, folder_ / "cache", &cached);
    return {std::move(evaluation), cached};
  }
  void write_health() const {
    fs::create_directories(folder_ / "health");
    write_file(folder_ / "health" / "perplexity.txt", "a river runs past the town and under the old bridge again");
    write_file(folder_ / "health" / "lambada.jsonl", "{\"text\": \"the river runs under the bridge\"}\n");
  }

  const testing::TemporaryFolder folder_{"evaluation"};
};

TEST_F(EvaluationTest, RemembersTheUneditedModel) {
  const auto model = worded_model({"llama", ""});
  const auto [first, from_disk] = before(model, {"counterfact", "easyedit"});
  EXPECT_FALSE(from_disk);
  EXPECT_EQ(stored(), 1U);
  const auto [again, cached] = before(model, {"counterfact", "easyedit"});
  EXPECT_TRUE(cached);
  EXPECT_EQ(again.summary, first.summary);
  EXPECT_EQ(again.cases, first.cases);
  EXPECT_EQ(evaluate(model, facts(), {"counterfact", "easyedit"}).summary, first.summary);
}

TEST_F(EvaluationTest, WhatChangesANumberIsNotTakenFromTheCache) {
  const auto model = worded_model({"llama", ""});
  (void)before(model, {"counterfact"});
  EXPECT_FALSE(before(model, {"easyedit"}).second) << "other families";
  EXPECT_FALSE(before(worded_model({"llama", ""}, false, at::kDouble, 2), {"counterfact"}).second) << "other weights";
  EXPECT_FALSE(before(worded_model({"llama", ""}, false, at::kFloat), {"counterfact"}).second) << "another dtype";
  EXPECT_FALSE(before(worded_model({"llama", ""}, true), {"counterfact"}).second) << "another tokenizer";
  {
    const devices::Tf32Products products(true);
    EXPECT_FALSE(before(model, {"counterfact"}).second) << "products of another precision";
  }
  {
    const auto scaled = worded_model({"llama", ""});
    scaled.weight(scaled.edit_site(0).weight_name).mul_(-3);
    EXPECT_FALSE(before(scaled, {"counterfact"}).second) << "weights that are not the file's any more";
    const auto count = stored();
    const auto hook = scaled.hooks().at({hooks::Site::kMlpOut, 0}).add([](const at::Tensor& x) { return x * 0; });
    EXPECT_FALSE(before(scaled, {"counterfact"}).second) << "a hook";
    EXPECT_EQ(stored(), count) << "what a hook did is not kept";
  }
  auto fewer = facts();
  fewer.facts.pop_back();
  fewer.fingerprint = datasets::fingerprint(fewer.facts);
  bool cached = true;
  (void)evaluate_before(model, fewer, {"counterfact"}, {}, folder_ / "cache", &cached);
  EXPECT_FALSE(cached) << "other facts";
  EvaluateOptions options;
  options.bootstrap = 10;
  EXPECT_FALSE(before(model, {"counterfact"}, options).second) << "the interval depends on the resamples";
  options = {};
  options.generation_length = 8;
  EXPECT_FALSE(before(model, {"generation"}, options).second);
  EXPECT_TRUE(before(model, {"generation"}, options).second);
  options.seed = 5;
  EXPECT_FALSE(before(model, {"generation"}, options).second) << "another seed";
  options = {};
  options.batch_tokens = 64;
  EXPECT_TRUE(before(model, {"counterfact"}, options).second) << "the batch size changes no number";
}

TEST_F(EvaluationTest, DamagedFilesAreMadeAgain) {
  const auto model = worded_model({"llama", ""});
  const auto [first, from_disk] = before(model, {"counterfact"});
  const auto path = fs::directory_iterator(folder_ / "cache" / "evaluations")->path();
  const std::string bytes = read_file(path);
  for (size_t at : {size_t{0}, bytes.size() / 2, bytes.size() - 2}) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    write_file(path, damaged);
    const auto [evaluation, cached] = before(model, {"counterfact"});
    EXPECT_FALSE(cached) << "byte " << at;
    EXPECT_EQ(evaluation.summary, first.summary);
    EXPECT_TRUE(before(model, {"counterfact"}).second) << "the damaged file was replaced";
  }
  write_file(path, bytes.substr(0, bytes.size() / 2));
  EXPECT_FALSE(before(model, {"counterfact"}).second);
}

TEST_F(EvaluationTest, DivergenceComparesWithTheRememberedDistributions) {
  auto model = worded_model({"llama", ""});
  write_health();
  EvaluateOptions options;
  options.health_data = folder_ / "health";
  (void)before(model, {"health"}, options);
  auto [stored, cached] = before(model, {"health"}, options);
  ASSERT_TRUE(cached);
  ASSERT_TRUE(stored.kept.at("health").defined());
  options.before = &stored;
  EXPECT_NEAR(evaluate(model, facts(), {"health"}, options).summary["health"]["divergence"].get<double>(), 0, 1e-9);
  const std::string name = model.edit_site(0).weight_name;
  model.set_weight(name, model.weight(name) * 3);
  const auto after = evaluate(model, facts(), {"health"}, options);
  // KL by hand: sum of p (log p - log q), mean over the probes.
  // Every figure with its own count, shares with an interval; one file a task, and nothing for a file without items.
  const auto& told = after.summary["health"];
  EXPECT_EQ(told["counts"]["lambada_accuracy"], 1);
  EXPECT_EQ(told["counts"]["divergence"], 32);
  EXPECT_TRUE(told["ci95"].contains("lambada_accuracy"));
  write_file(folder_ / "health" / "health_mmlu.json", "[]");
  EXPECT_THROW((void)evaluate(model, facts(), {"health"}, options), Error) << "a task without an item has no figure";
  std::filesystem::remove(folder_ / "health" / "health_mmlu.json");
  write_file(folder_ / "health" / "wikitext2.txt", "another text of the same task");
  EXPECT_THROW((void)evaluate(model, facts(), {"health"}, options), Error);
  const at::Tensor p = stored.kept.at("health").to(at::kDouble), q = after.kept.at("health").to(at::kDouble);
  const double expected = (p.exp() * (p - q)).sum(-1).mean().item<double>();
  EXPECT_GT(expected, 1e-6);
  EXPECT_NEAR(after.summary["health"]["divergence"].get<double>(), expected, 1e-6 * std::max(1.0, expected));
}

TEST_F(EvaluationTest, GeneratedTextGivesEntropyReferenceAndEssence) {
  const auto model = worded_model({"llama", ""});
  // The texts of the first fact's new target and of its subject; the generated words are t3, t4, …
  write_file(folder_ / "snippets.json", R"([
{"relation_id": "P1", "target_id": "Q1", "samples": [{"name": "The Forum", "text": "t10 t11 t12 t13 t14 t15 t16 t17 t18"}]},
{"relation_id": "P1", "target_id": "Q2", "samples": [{"name": "The tall tower", "text": "the tower is tall"}]},
{"relation_id": "P9", "target_id": "Q9", "samples": [{"name": "other", "text": "t20 t21 t22 unrelated words"}]}])");
  EvaluateOptions options;
  options.generation_length = 30;
  options.snippets = folder_ / "snippets.json";
  const auto first = evaluate(model, facts(), {"generation"}, options);
  const auto again = evaluate(model, facts(), {"generation"}, options);
  EXPECT_EQ(first.summary, again.summary) << "equal seeds give equal texts";
  options.seed = 9;
  EXPECT_NE(evaluate(model, facts(), {"generation"}, options).cases[0]["generation"]["text"],
            first.cases[0]["generation"]["text"]);
  const json &one = first.cases[0]["generation"], &two = first.cases[1]["generation"];
  ASSERT_EQ(one["text"].size(), 2U);
  const auto texts = one["text"].get<std::vector<std::string>>();
  EXPECT_NEAR(one["ngram_entropy"].get<double>(), mean_ngram_entropy(texts), 1e-12);
  EXPECT_NEAR(first.summary["generation"]["ngram_entropy"].get<double>(),
              50 * (one["ngram_entropy"].get<double>() + two["ngram_entropy"].get<double>()), 1e-9);
  const TfIdf vectors({"t10 t11 t12 t13 t14 t15 t16 t17 t18", "the tower is tall", "t20 t21 t22 unrelated words"});
  EXPECT_NEAR(one["reference_score"].get<double>(),
              vectors.similarity(texts[0] + " " + texts[1], "t10 t11 t12 t13 t14 t15 t16 t17 t18"), 1e-9);
  EXPECT_TRUE(two["reference_score"].is_null()) << "no reference text for the second fact";
  // Perplexity of the subject's text: n tokens counted, the first of which is not predicted.
  const auto score = score_requests(model, {{"the", "tower is tall"}})[0];
  EXPECT_NEAR(one["essence_score"].get<double>(), std::exp(-score.total_log_prob() / 4), 1e-9);
  EXPECT_TRUE(two["essence_score"].is_null());
}

// However many are sampled together, a text is the same.
TEST_F(EvaluationTest, SampledTextsDoNotDependOnTheirBatch) {
  const auto model = worded_model({"llama", ""});
  std::vector<std::string> prompts;
  for (int i = 0; i < 20; ++i) prompts.push_back("the tower " + std::to_string(i % 3));
  EvaluateOptions options;
  options.generation_length = 10;
  const auto together = detail::generate_texts(model, prompts, options);
  EXPECT_NE(together[0], together[12]) << "equal prompts have numbers of their own";
  options.batch_tokens = 1;  // groups of eight
  EXPECT_EQ(detail::generate_texts(model, prompts, options), together);
  const std::vector<std::string> last(prompts.begin() + 15, prompts.end());
  EXPECT_EQ(detail::generate_texts(model, last, options, 15),
            std::vector<std::string>(together.begin() + 15, together.end()));
}

/// Natural log-probability of each token but the first, from the whole text's logits.
std::vector<double> token_log_probs(const models::Model& model, const std::vector<int64_t>& ids) {
  const at::Tensor log_probs = model.forward(models::TokenBatch::from_rows({ids})).logits.log_softmax(-1);
  std::vector<double> out;
  for (size_t i = 1; i < ids.size(); ++i) out.push_back(log_probs[static_cast<int64_t>(i) - 1][ids[i]].item<double>());
  return out;
}

TEST(Health, PerplexityIsThatOfWindows) {
  const auto model = worded_model({"llama", ""});
  std::string text = "begin";
  for (int i = 0; i < 24; ++i) text += " word" + std::to_string(i % 9);
  const auto ids = model.tokenizer().encode_ids(text);
  double sum = 0;
  int64_t n = 0;
  for (size_t begin = 0; begin < ids.size(); begin += 10) {
    const std::vector<int64_t> window(ids.begin() + static_cast<long>(begin),
                                      ids.begin() + static_cast<long>(std::min(begin + 10, ids.size())));
    for (double log_prob : token_log_probs(model, window)) sum -= log_prob, ++n;
  }
  const auto got = perplexity(model, text, 10);
  EXPECT_EQ(got.tokens, n);
  EXPECT_NEAR(got.value, std::exp(sum / static_cast<double>(n)), 1e-6 * got.value);
  EXPECT_EQ(perplexity(model, text, 10, 10).tokens, 9);
}

TEST(Health, LambadaAsksForTheLastWord) {
  const auto model = worded_model({"llama", ""});
  const std::vector<std::string> texts = {"the river runs under the bridge", "one more line of text"};
  double sum = 0;
  for (const auto& text : texts) sum -= token_log_probs(model, model.tokenizer().encode_ids(text)).back();
  const auto got = lambada(model, texts);
  EXPECT_EQ(got.n, 2);
  EXPECT_NEAR(got.perplexity, std::exp(sum / 2), 1e-6 * got.perplexity);
  EXPECT_EQ(lambada(model, {texts[0] + "\r\n", texts[1] + "\t"}).perplexity, got.perplexity);
  // A text whose last word is what the model says is right.
  const auto logits = model.forward(models::TokenBatch::from_rows({model.tokenizer().encode_ids("the river")})).logits;
  const int64_t said = logits[-1].argmax().item<int64_t>();
  for (int i = 0; i < 100000; ++i) {
    const std::string word = "w" + std::to_string(i);
    if (model.tokenizer().encode_ids(" " + word)[0] != said) continue;
    EXPECT_EQ(lambada(model, {"the river " + word, "the river " + word + "x"}).accuracy, 50);
    return;
  }
  FAIL() << "no word with the model's answer";
}

TEST(Health, MultipleChoiceTakesTheMostProbableOption) {
  const auto model = worded_model({"llama", ""});
  std::vector<Choice> items;
  std::vector<int64_t> chosen, normalised;
  for (int i = 0; i < 12; ++i) {
    const std::string prompt = "question " + std::to_string(i);
    const std::vector<std::string> options = {"one", "two longer words" + std::to_string(i)};
    std::vector<double> sums, per_character;
    for (const auto& option : options) {
      const auto log_probs = token_log_probs(model, model.tokenizer().encode_ids(prompt + " " + option));
      double sum = 0;
      for (size_t t = model.tokenizer().encode_ids(prompt).size() - 1; t < log_probs.size(); ++t) sum += log_probs[t];
      sums.push_back(sum);
      per_character.push_back(sum / static_cast<double>(option.size()));
    }
    chosen.push_back(sums[1] > sums[0]);
    normalised.push_back(per_character[1] > per_character[0]);
    items.push_back({prompt, options, i % 3 == 0 ? 1 : 0});
  }
  const auto got = multiple_choice(model, items);
  EXPECT_EQ(got.chosen, chosen);
  double right = 0, right_normalised = 0, tp = 0, tn = 0, fp = 0, fn = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    right += chosen[i] == items[i].answer;
    right_normalised += normalised[i] == items[i].answer;
    tp += chosen[i] == 1 && items[i].answer == 1;
    tn += chosen[i] == 0 && items[i].answer == 0;
    fp += chosen[i] == 1 && items[i].answer == 0;
    fn += chosen[i] == 0 && items[i].answer == 1;
  }
  EXPECT_NEAR(got.accuracy, 100 * right / 12, 1e-9);
  EXPECT_NEAR(got.accuracy_normalised, 100 * right_normalised / 12, 1e-9);
  const double below = std::sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn));
  ASSERT_TRUE(got.matthews);
  EXPECT_NEAR(*got.matthews, below == 0 ? 0 : 100 * (tp * tn - fp * fn) / below, 1e-9);
}

}  // namespace evaluation_test
}  // namespace emend::evaluation
