// Every published data set, as far as it is there, from the file to the figures, on a small random model.
#include <ATen/ATen.h>
#include <emend/evaluation/evaluation.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/hash_tokenizer.h"
#include "support/shared.h"

namespace emend::evaluation {
namespace evaluation_shared_test {

models::Model small_model() {
  auto config = testing::debug_config("llama", "");
  config["max_position_embeddings"] = 4096;  // the examples in front of MQuAKE's questions
  return models::load_model(testing::hashed_checkpoint(models::random_checkpoint(config, 1)));
}

TEST(EvaluationShared, EveryFactsFileGivesFigures) {
  EMEND_NEEDS_SHARED();
  const auto model = small_model();
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(testing::shared_dir() / "data")) {
    const std::string name = entry.path().filename().string();
    if (entry.path().extension() != ".json" || name.starts_with("health_") || name.starts_with("known_")) continue;
    SCOPED_TRACE(name);
    ++files;
    datasets::ReadOptions read;
    read.limit = 12;
    const auto facts = datasets::load_facts(entry.path(), read);
    const auto families = resolve_metrics({"auto"}, facts);
    EXPECT_FALSE(families.empty());
    const auto before = evaluate(model, facts, families);
    EvaluateOptions options;
    options.before = &before;
    const auto after = evaluate(model, facts, families, options);
    for (const auto& family : families) {
      const auto& summary = after.summary.at(family);
      size_t numbers = 0;
      for (const auto& field : metric_info(family).fields) {
        if (!summary.contains(field.key) || summary[field.key].is_null()) continue;
        ++numbers;
        EXPECT_TRUE(std::isfinite(summary[field.key].get<double>())) << family << " " << field.key;
      }
      EXPECT_GT(numbers, 0U) << family;
      if (family == "easyedit" && !summary["locality_acc"].is_null()) {
        EXPECT_EQ(summary["locality_acc"], 100) << "the model did not change";
      }
    }
    EXPECT_EQ(after.cases.size(), facts.facts.size());
  }
  EXPECT_GE(files, 15U);
}

TEST(EvaluationShared, EveryHealthFileGivesFigures) {
  EMEND_NEEDS_SHARED();
  const auto model = small_model();
  EvaluateOptions options;
  options.health_data = testing::shared_dir() / "data";
  options.health_limit = 8;
  datasets::ReadOptions read;
  read.limit = 1;
  const auto facts = datasets::load_facts(testing::shared_dir() / "data" / "counterfact_full.json", read);
  const auto summary = evaluate(model, facts, {"health"}, options).summary.at("health");
  for (const char* key : {"perplexity", "lambada_accuracy", "lambada_perplexity", "mmlu_accuracy", "piqa_accuracy",
                          "sst2_accuracy", "rte_accuracy", "cola_accuracy"}) {
    ASSERT_TRUE(summary.contains(key)) << key << " in " << summary.dump();
    EXPECT_TRUE(std::isfinite(summary[key].get<double>())) << key;
  }
}

}  // namespace evaluation_shared_test
}  // namespace emend::evaluation
