// The published data sets, as far as they are there: every file loads, with the counts that an independent reading
// gives.
#include <emend/core/atomic_file.h>
#include <emend/datasets/convert.h>
#include <emend/datasets/corpus.h>
#include <emend/datasets/lint.h>
#include <gtest/gtest.h>

#include <chrono>

#include "support/shared.h"

namespace emend::datasets {
namespace facts_shared_test {

/// What is counted, summed over the facts of a file.
struct Counts {
  size_t facts = 0, groups = 0, paraphrases = 0, neighbours = 0, locality = 0, locality_answers = 0, portability = 0,
         portability_answers = 0;
  int64_t skipped = 0;
  bool operator==(const Counts&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Counts& c) {
  return out << c.facts << " facts, " << c.groups << " groups, " << c.paraphrases << " paraphrases, " << c.neighbours
             << " neighbours, locality " << c.locality << "/" << c.locality_answers << ", portability " << c.portability
             << "/" << c.portability_answers << ", skipped " << c.skipped;
}

Counts count(const FactSet& set) {
  Counts counts;
  counts.facts = set.facts.size();
  counts.groups = set.groups.size();
  counts.skipped = std::ssize(set.skipped);
  for (const Fact& fact : set.facts) {
    counts.paraphrases += fact.paraphrase_prompts.size();
    counts.neighbours += fact.neighborhood_prompts.size();
    for (const auto& [name, probes] : fact.locality)
      for (const Probe& probe : probes) ++counts.locality, counts.locality_answers += probe.answers.size();
    for (const auto& [name, probes] : fact.portability)
      for (const Probe& probe : probes) ++counts.portability, counts.portability_answers += probe.answers.size();
  }
  return counts;
}

struct Expected {
  const char* file;
  const char* format;
  ReadOptions options;
  Counts counts;
};

TEST(FactsShared, EveryFileLoads) {
  EMEND_NEEDS_SHARED();
  const ReadOptions alt{.zsre_target = "alt"};
  // Figures counted with Python's json module on the same files.
  const std::vector<Expected> files = {
      {"counterfact_full.json", "counterfact", {}, {797, 0, 1594, 7970, 610, 610, 778 + 134, 778 + 134, 0}},
      {"counterfact_easyedit.json", "easyedit", {}, {2000, 0, 2000, 2000, 2000, 2000, 0, 0, 0}},
      {"zsre_mend_eval.json", "zsre", {}, {531, 0, 531, 0, 531, 531, 531, 531, 0}},
      {"zsre_mend_eval.json", "zsre", alt, {531, 0, 531, 0, 531, 531, 531, 531, 0}},
      {"zsre_mend_train.json", "zsre", {}, {1000, 0, 1000, 0, 1000, 1000, 0, 0, 0}},
      {"zsre_mend_train.json", "zsre", alt, {998, 0, 998, 0, 998, 998, 0, 0, 2}},
      {"knowedit_wiki_recent.json", "knowedit", {}, {300, 0, 0, 0, 1058, 8506, 343, 1959, 0}},
      {"knowedit_wiki_counterfact.json", "knowedit", {}, {300, 0, 0, 0, 434, 434, 477, 477, 0}},
      {"knowedit_zsre.json", "knowedit", {}, {300, 0, 300, 0, 600, 600, 300, 300, 0}},
      {"knowedit_wikibio.json", "knowedit", {}, {300, 0, 0, 0, 600, 600, 0, 0, 0}},
      {"knowedit_convsent.json", "knowedit", {}, {150, 0, 300, 0, 0, 0, 0, 0, 0}},
      {"mquake_hard.json", "mquake", {}, {1200, 300, 1200, 0, 0, 0, 0, 0, 0}},
      {"conflictedit_reverse.json", "conflictedit", {}, {400, 200, 400, 0, 0, 0, 0, 0, 0}},
      {"conflictedit_composite.json", "conflictedit", {}, {400, 200, 400, 0, 0, 0, 0, 0, 0}},
      {"conflictedit_coverage.json", "conflictedit", {}, {400, 200, 400, 0, 0, 0, 0, 0, 0}},
      {"roundedit_easy.json", "conflictedit", {}, {200, 200, 200, 0, 0, 0, 0, 0, 0}},
      {"roundedit_hard.json", "conflictedit", {}, {200, 200, 200, 0, 0, 0, 0, 0, 0}},
  };
  const auto start = std::chrono::steady_clock::now();
  int64_t rows = 0;
  for (const Expected& expected : files) {
    SCOPED_TRACE(expected.file);
    const FactSet set = load_facts(emend::testing::shared_dir() / "data" / expected.file, expected.options);
    EXPECT_EQ(set.format, expected.format);
    EXPECT_EQ(count(set), expected.counts);
    EXPECT_TRUE(set.unread.empty()) << "known, and not to be warned about: " << set.unread.front().key;
    rows += set.rows;
    for (const Fact& fact : set.facts) {
      validate(fact);
      EXPECT_GT(fact.line, 1) << "one row a line, after the opening bracket";
    }
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  RecordProperty("rows", static_cast<int>(rows));
  RecordProperty("milliseconds", static_cast<int>(taken.count() * 1000));
  std::cout << files.size() << " readings, " << rows << " rows, " << taken.count() << " s\n";
  EXPECT_LT(taken.count(), 30);
}

TEST(FactsShared, MquakeQuestionsAndAliases) {
  EMEND_NEEDS_SHARED();
  const FactSet set = load_facts(emend::testing::shared_dir() / "data" / "mquake_hard.json");
  size_t questions = 0, answers = 0, hops = 0, hop_answers = 0;
  for (const FactGroup& group : set.groups) {
    questions += group.questions.size();
    answers += group.new_answers.size();
    hops += group.single_hops.size();
    for (const Hop& hop : group.new_single_hops) hop_answers += hop.answers.size();
    EXPECT_EQ(group.facts.size(), 4U);
  }
  EXPECT_EQ(questions, 900U);
  EXPECT_EQ(answers, 702U);
  EXPECT_EQ(hops, 1200U);
  EXPECT_EQ(hop_answers, 6533U);
}

TEST(FactsShared, KnownFactsAndCorpora) {
  EMEND_NEEDS_SHARED();
  const auto data = emend::testing::shared_dir() / "data";
  EXPECT_EQ(parse_known_facts(read_file(data / "known_1000.json"), "known_1000.json").size(), 1209U);
  const auto size = [&](const char* file) {
    std::pair<int64_t, int64_t> size;
    read_corpus(data / file, [&](const Document& document) {
      ++size.first;
      size.second += static_cast<int64_t>(document.text.size());
      return true;
    });
    return size;
  };
  EXPECT_EQ(size("wiki_sample.jsonl"), (std::pair<int64_t, int64_t>(2349, 1835156)));
  EXPECT_EQ(size("wiki_squad_contexts.jsonl"), (std::pair<int64_t, int64_t>(911, 686763)));
  EXPECT_EQ(size("lambada_openai_test.jsonl"), (std::pair<int64_t, int64_t>(1500, 490612)));
  EXPECT_EQ(size("wikitext2_valid.txt"), (std::pair<int64_t, int64_t>(1160, 1115603)));
  EXPECT_EQ(corpus_hash(data / "wiki_sample.jsonl"),
            "f6e6919e341b8dfe0cc0a61113bdc4487171851dd9465b55a034565a19043f9c");
}

TEST(FactsShared, ShortFormLosesNothing) {
  EMEND_NEEDS_SHARED();
  for (const char* file : {"counterfact_full.json", "counterfact_easyedit.json", "zsre_mend_eval.json",
                           "knowedit_wiki_recent.json", "knowedit_zsre.json", "knowedit_wikibio.json"}) {
    SCOPED_TRACE(file);
    const FactSet set = load_facts(emend::testing::shared_dir() / "data" / file);
    EXPECT_EQ(parse_facts(format_facts(set.facts, "jsonl"), "again").fingerprint, set.fingerprint);
    // And each published format writes its own rows back without loss.
    EXPECT_EQ(parse_facts(format_facts(set.facts, set.format), "again", {.format = set.format}).fingerprint,
              set.fingerprint);
  }
}

TEST(FactsShared, LintReadsEveryFile) {
  EMEND_NEEDS_SHARED();
  size_t errors = 0;
  for (const auto& entry : std::filesystem::directory_iterator(emend::testing::shared_dir() / "data")) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("counterfact", 0) != 0 && name.rfind("knowedit", 0) != 0 && name.rfind("conflictedit", 0) != 0)
      continue;
    for (const Finding& finding :
         lint_facts(load_facts(entry.path(), {.bad_rows = BadRowPolicy::kSkip, .allow_empty = true}))) {
      EXPECT_FALSE(finding.text.empty());
      errors += finding.severity == Severity::kError ? 1 : 0;
      const bool by_design = finding.check == "contradiction" && name.rfind("conflictedit", 0) == 0;
      EXPECT_FALSE(by_design && finding.severity == Severity::kError) << finding.where;
    }
  }
  RecordProperty("errors", static_cast<int>(errors));
}

}  // namespace facts_shared_test
}  // namespace emend::datasets
