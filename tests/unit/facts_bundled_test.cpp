// The facts that come with emend keep the promises of docs/formats/facts.md.
#include <emend/datasets/lint.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "support/shared.h"

namespace emend::datasets {
namespace facts_bundled_test {

TEST(FactsBundled, ShapeOfEveryFact) {
  const FactSet set = load_bundled_facts();
  EXPECT_EQ(set.format, "counterfact");
  EXPECT_GE(set.facts.size(), 64U);
  std::map<std::string, std::set<std::string>> answers_by_relation;
  for (const Fact& fact : set.facts) answers_by_relation[fact.relation_id].insert(*fact.target_true);
  EXPECT_GE(answers_by_relation.size(), 10U);
  std::set<std::string> requests;
  for (const Fact& fact : set.facts) {
    SCOPED_TRACE(fact.full_prompt());
    EXPECT_TRUE(requests.insert(fact.full_prompt()).second);
    ASSERT_TRUE(fact.target_true.has_value());
    EXPECT_NE(fact.target_new, *fact.target_true);
    EXPECT_TRUE(answers_by_relation[fact.relation_id].contains(fact.target_new))
        << "the new answer is of the same kind as the old";
    EXPECT_EQ(fact.paraphrase_prompts.size(), 2U);
    EXPECT_GE(fact.neighborhood_prompts.size(), 5U);
    EXPECT_GE(fact.generation_prompts.size(), 3U);
    EXPECT_GE(fact.attribute_prompts.size(), 3U);
    for (const auto* prompts : {&fact.paraphrase_prompts, &fact.generation_prompts})
      for (const std::string& prompt : *prompts) EXPECT_NE(prompt.find(fact.subject), std::string::npos) << prompt;
    for (const auto* prompts : {&fact.neighborhood_prompts, &fact.attribute_prompts})
      for (const std::string& prompt : *prompts) {
        EXPECT_EQ(prompt.find(fact.subject), std::string::npos) << prompt;
        EXPECT_FALSE(requests.contains(prompt) && prompt == fact.full_prompt());
      }
  }
}

TEST(FactsBundled, NoPromptIsSpoiltByAnotherEdit) {
  const FactSet set = load_bundled_facts();
  std::set<std::string> edited;
  for (const Fact& fact : set.facts) edited.insert(fact.full_prompt());
  for (const Fact& fact : set.facts)
    for (const auto* prompts : {&fact.neighborhood_prompts, &fact.attribute_prompts})
      for (const std::string& prompt : *prompts) EXPECT_FALSE(edited.contains(prompt)) << prompt << " is itself edited";
}

TEST(FactsBundled, LintHasNothingToSay) {
  for (const Finding& finding : lint_facts(load_bundled_facts()))
    ADD_FAILURE() << finding.where << ": " << finding.check << ": " << finding.text;
}

TEST(FactsBundled, TheFileInTheTreeIsTheOneCompiledIn) {
  EXPECT_EQ(load_facts(std::filesystem::path(EMEND_SOURCE_DIR) / "datasets" / "emend_facts.json").fingerprint,
            load_bundled_facts().fingerprint);
}

TEST(FactsBundled, FirstFactsCoverManyRelations) {
  std::set<std::string> relations;
  for (const Fact& fact : load_bundled_facts({.limit = 16}).facts) relations.insert(fact.relation_id);
  EXPECT_GE(relations.size(), 10U) << "a short run shall not test one relation only";
}

TEST(FactsBundled, NothingIsCopiedFromThePublishedSets) {
  EMEND_NEEDS_SHARED();
  std::set<std::string> published;
  for (const char* file :
       {"counterfact_full.json", "counterfact_easyedit.json", "zsre_mend_eval.json", "knowedit_wiki_counterfact.json"})
    for (const Fact& fact : load_facts(emend::testing::shared_dir() / "data" / file).facts) {
      published.insert(fact.full_prompt());
      published.insert(fact.paraphrase_prompts.begin(), fact.paraphrase_prompts.end());
    }
  for (const Fact& fact : load_bundled_facts().facts) {
    EXPECT_FALSE(published.contains(fact.full_prompt())) << fact.full_prompt();
    for (const std::string& prompt : fact.paraphrase_prompts) EXPECT_FALSE(published.contains(prompt)) << prompt;
  }
}

}  // namespace facts_bundled_test
}  // namespace emend::datasets
