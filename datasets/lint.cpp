#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/datasets/detail/lint_text.h>
#include <emend/datasets/detail/rows.h>
#include <emend/datasets/lint.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace emend::datasets {

std::string plain(std::string_view text) {
  std::string result = lower(composed(detail::tidy(text)));
  if (result.size() > 1 && result.back() == '.') result.pop_back();
  return result;
}

void require_prompt_size(const std::string& where, std::string_view prompt) {
  constexpr size_t kMost = 32 * 1024;
  if (prompt.size() > kMost)
    throw Error(ErrorClass::kInvalidArgument, {where, "a prompt of " + std::to_string(prompt.size()) + " bytes",
                                               "at most " + std::to_string(kMost), "write one prompt a line"});
}

namespace {

Finding about(const FactSet& set, size_t index, Severity severity, const char* check, std::string text) {
  return {severity, check, index, set.facts[index].where(), std::move(text)};
}

/// Facts that ask for the same thing: once too often, or for different answers.
void check_conflicts(const FactSet& set, std::vector<Finding>& findings) {
  std::unordered_map<std::string, size_t> first_by_question, first_by_relation;
  std::unordered_set<size_t> by_design;
  for (const FactGroup& group : set.groups)
    if (group.sequential) by_design.insert(group.facts.begin(), group.facts.end());
  for (size_t i = 0; i < set.facts.size(); ++i) {
    const Fact& fact = set.facts[i];
    const auto [question, new_question] = first_by_question.try_emplace(plain(fact.full_prompt()), i);
    const std::string relation_key =
        fact.relation_id.empty() ? std::string() : plain(fact.subject) + "\n" + fact.relation_id;
    const auto [relation, new_relation] = relation_key.empty() ? std::pair(first_by_relation.end(), true)
                                                               : first_by_relation.try_emplace(relation_key, i);
    if (new_question && new_relation) continue;
    const Fact& earlier = set.facts[new_question ? relation->second : question->second];
    const bool same_answer = plain(earlier.target_new) == plain(fact.target_new);
    const std::string both =
        new_question ? "the same subject and relation (" + fact.relation_id + ")" : "the same prompt";
    if (same_answer && !new_question) {
      Finding finding =
          about(set, i, Severity::kWarning, "duplicate", "the same request as at " + earlier.where() + "; remove one");
      finding.remove = true;
      findings.push_back(std::move(finding));
    } else if (same_answer) {
      findings.push_back(about(set, i, Severity::kNote, "same-relation",
                               both + " as at " + earlier.where() + ", with the same answer in other words"));
    } else if (by_design.contains(i)) {
      findings.push_back(about(set, i, Severity::kNote, "contradiction",
                               both + " as at " + earlier.where() +
                                   " with another answer, as this data set intends; edit one after the other (" +
                                   setting("batch_size", "1") + ")"));
    } else {
      findings.push_back(about(set, i, new_question ? Severity::kWarning : Severity::kError, "contradiction",
                               both + " as at " + earlier.where() + " but \"" + shorten(fact.target_new, 40) +
                                   "\" instead of \"" + shorten(earlier.target_new, 40) + "\"; keep one"));
    }
  }
}

/// Prompts that are alike up to the subject's end give locate-then-edit methods one and the same key for several
/// answers.
void check_shared_keys(const FactSet& set, std::vector<Finding>& findings) {
  std::unordered_map<std::string, std::vector<size_t>> by_key;
  std::vector<std::string> order;
  for (size_t i = 0; i < set.facts.size(); ++i) {
    const Fact& fact = set.facts[i];
    const std::string key = fact.prompt.substr(0, fact.prompt.find("{}")) + "\n" + fact.subject;
    auto& members = by_key[key];
    if (members.empty()) order.push_back(key);
    members.push_back(i);
  }
  for (const std::string& key : order) {
    const auto& members = by_key[key];
    std::unordered_set<std::string> answers;
    for (const size_t i : members) answers.insert(plain(set.facts[i].target_new));
    if (answers.size() < 2) continue;
    findings.push_back(
        about(set, members[1], Severity::kNote, "shared-key",
              std::to_string(members.size()) + " facts about \"" + shorten(set.facts[members[0]].subject, 40) +
                  "\" (first at " + set.facts[members[0]].where() +
                  ") begin alike up to the subject: in one batch they share a key and their targets are averaged"));
  }
}

}  // namespace

std::string_view to_string(Severity severity) noexcept {
  return severity == Severity::kError ? "error" : severity == Severity::kWarning ? "warning" : "note";
}

std::vector<Finding> lint_facts(const FactSet& facts, const std::vector<LintCheck>& more) {
  std::vector<Finding> findings;
  for (const BadRow& row : facts.bad_rows) {
    const std::string where = facts.path + ":" + std::to_string(row.line);  // which the text repeats
    findings.push_back({Severity::kError, "unusable-row", Finding::kNoFact, where,
                        row.text.starts_with(where + ": ") ? row.text.substr(where.size() + 2) : row.text});
  }
  for (size_t i = 0; i < facts.facts.size(); ++i) detail::lint_text(facts.facts[i], i, findings);
  check_conflicts(facts, findings);
  check_shared_keys(facts, findings);
  for (const LintCheck& check : more)
    for (Finding& finding : check(facts)) findings.push_back(std::move(finding));
  const auto line_of = [&](const Finding& finding) {
    if (finding.fact < facts.facts.size()) return facts.facts[finding.fact].line;
    const size_t colon = finding.where.rfind(':');
    return colon == std::string::npos
               ? int64_t{0}
               : static_cast<int64_t>(std::strtoll(finding.where.c_str() + colon + 1, nullptr, 10));
  };
  std::stable_sort(findings.begin(), findings.end(), [&](const Finding& a, const Finding& b) {
    return std::pair(line_of(a), a.severity) < std::pair(line_of(b), b.severity);
  });
  return findings;
}

FactSet fix_facts(FactSet facts, const std::vector<Finding>& findings, size_t* applied) {
  std::vector<bool> removed(facts.facts.size(), false);
  std::unordered_set<size_t> grouped;
  for (const FactGroup& group : facts.groups) grouped.insert(group.facts.begin(), group.facts.end());
  size_t count = 0;
  for (const Finding& finding : findings) {
    if (finding.fact >= facts.facts.size() || !finding.fixable()) continue;
    if (finding.remove && grouped.contains(finding.fact)) continue;
    ++count;
    if (finding.remove) {
      removed[finding.fact] = true;
    } else {
      finding.edit(facts.facts[finding.fact]);
    }
  }
  std::vector<Fact> kept;
  std::vector<size_t> new_index(facts.facts.size());
  for (size_t i = 0; i < facts.facts.size(); ++i) {
    new_index[i] = kept.size();
    if (!removed[i]) kept.push_back(std::move(facts.facts[i]));
  }
  facts.facts = std::move(kept);
  for (FactGroup& group : facts.groups)
    for (size_t& index : group.facts) index = new_index[index];
  facts.fingerprint = fingerprint(facts.facts);
  if (applied) *applied = count;
  return facts;
}

const std::vector<LintInfo>& lint_checks() {
  static const std::vector<LintInfo> checks = {
      {"unusable-row", "error: the row is not a fact (subject absent or repeated, wrong type, too long, …)"},
      {"contradiction",
       "error: the same prompt with another answer; warning: the same subject and relation_id with another answer"},
      {"duplicate", "warning, fixable: the same request twice"},
      {"same-relation", "note: the same subject, relation and answer in other words"},
      {"shared-key",
       "note: several facts share the text up to the end of the subject, so their targets are averaged in one batch"},
      {"whitespace", "warning, fixable: blanks at the ends, repeated blanks, line breaks or no-break spaces"},
      {"control-characters", "warning: control or escape characters, or marks that turn the direction of text"},
      {"invisible-characters", "warning, fixable: zero-width spaces and the like"},
      {"prompt-is-subject", "warning: nothing but {} in the prompt"},
      {"subject-glued", "warning: a letter touches {}"},
      {"target-is-subject", "warning: target_new equals the subject"},
      {"target-in-prompt", "warning: the prompt gives the new answer away"},
      {"target-unchanged", "warning: target_new equals target_true"},
      {"shared-ending", "note: new and old answer end in the same word"},
      {"long-target", "note: more than 20 words in target_new"},
      {"no-old-answer", "warning: neighbourhood prompts without target_true"},
      {"neighbour-is-subject", "warning: a neighbourhood prompt names the subject"},
      {"repeated-paraphrase", "note: a paraphrase repeats the prompt or another paraphrase"},
  };
  return checks;
}

}  // namespace emend::datasets
