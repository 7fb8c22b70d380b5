#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/utf8.h>
#include <emend/datasets/detail/reader.h>
#include <emend/datasets/lint.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace emend::datasets {
namespace {

using detail::each_text;

/// Zero-width space, joiners' neighbours that only come from copying, soft hyphen, byte-order mark.
constexpr std::string_view kInvisible[] = {"\xE2\x80\x8B", "\xE2\x81\xA0", "\xC2\xAD", "\xEF\xBB\xBF"};

bool has_invisible(std::string_view text) {
  return std::ranges::any_of(kInvisible,
                             [&](std::string_view mark) { return text.find(mark) != std::string_view::npos; });
}

/// The white space of any script at `at`: its bytes, or 0.
size_t space_at(std::string_view text, size_t at) {
  if (std::isspace(static_cast<unsigned char>(text[at]))) return 1;
  const std::string_view here = text.substr(at, 3);
  if (here.starts_with("\xC2\xA0")) return 2;
  if (here >= "\u2000" && here <= "\u200A") return 3;
  constexpr std::string_view kOthers[] = {"\u1680", "\u2028", "\u2029", "\u202F", "\u205F", "\u3000"};
  return std::ranges::find(kOthers, here) == std::end(kOthers) ? 0 : 3;
}

/// Collapses runs of white space of any width to one space, drops invisible characters, trims.
std::string tidy(std::string_view text) {
  std::string result;
  bool pending = false;
  for (size_t i = 0; i < text.size();) {
    const auto starts = [&](std::string_view mark) { return text.substr(i, mark.size()) == mark; };
    const auto* invisible = std::ranges::find_if(kInvisible, starts);
    if (invisible != std::end(kInvisible)) {
      i += invisible->size();
      continue;
    }
    if (const size_t space = space_at(text, i); space > 0) {
      pending = !result.empty();
      i += space;
      continue;
    }
    if (pending) result += ' ';
    pending = false;
    result += text[i++];
  }
  return result;
}

bool ends_in_space(std::string_view text) {
  size_t last = text.size() - 1;
  while (last > 0 && (text[last] & 0xC0) == 0x80) --last;
  return space_at(text, last) > 0;
}

size_t word_count(const std::string& text) {
  std::istringstream words(text);
  return static_cast<size_t>(std::distance(std::istream_iterator<std::string>(words), {}));
}

/// `word` in `text` and no part of a longer word of a script that sets words apart.
bool contains_word(std::string_view text, std::string_view word) {
  const auto inside = [&](size_t at) {
    return at > 0 && at < text.size() && in_spaced_word(text, at - 1) && in_spaced_word(text, at);
  };
  for (size_t at = 0; !word.empty() && (at = text.find(word, at)) != std::string_view::npos; ++at)
    if (!inside(at) && !inside(at + word.size())) return true;
  return false;
}

std::string last_word(const std::string& text) {
  return text.substr(text.find_last_of(' ') + 1);
}

struct Report {
  const Fact& fact;
  size_t index;
  std::vector<Finding>& findings;
  void add(Severity severity, const char* check, std::string text, std::function<void(Fact&)> edit = {}) {
    findings.push_back({severity, check, index, fact.where(), std::move(text), std::move(edit)});
  }
};

/// What steers a terminal or turns the direction of text: emend shows it escaped, but the model reads it.
void check_controls(Report& report, const Fact& fact) {
  std::string texts;
  each_text(fact, [&](const char* what, const std::string& text) {
    if (!is_printable(text)) append_item(texts, what + (" \"" + shorten(printable(text, false), 60)) + "\"");
  });
  if (!texts.empty())
    report.add(Severity::kWarning, "control-characters",
               "control characters or marks that turn the direction of text in " + shorten(texts, 300) +
                   "; they become tokens of their own: remove them");
}

/// Stray blanks and invisible characters in one of the three texts that are edited in.
void check_blanks(Report& report, const Fact& fact) {
  const auto one = [&](const char* name, std::string Fact::*member) {
    const std::string& text = fact.*member;
    if (has_invisible(text))
      report.add(Severity::kWarning, "invisible-characters",
                 std::string(name) + " holds invisible characters, which become tokens of their own; remove them",
                 [member](Fact& f) { f.*member = tidy(f.*member); });
    else if (tidy(text) != text)
      report.add(Severity::kWarning, "whitespace",
                 std::string(name) + " \"" + shorten(text, 50) +
                     "\" has blanks at its ends, repeated or wide blanks, line breaks or no-break spaces; use single "
                     "spaces",
                 [member](Fact& f) { f.*member = tidy(f.*member); });
  };
  one("the prompt", &Fact::prompt);
  one("the subject", &Fact::subject);
  // Long texts (a biography's sentence, an opinion) may have line breaks for a reason.
  if (word_count(fact.target_new) <= 8) one("target_new", &Fact::target_new);
  size_t others = 0;
  std::string first;
  each_text(fact, [&](const char* what, const std::string& text) {
    const bool edited = &text == &fact.prompt || &text == &fact.subject || &text == &fact.target_new;
    if (edited || text.empty() || (space_at(text, 0) == 0 && !ends_in_space(text))) return;
    if (others++ == 0) first = what + (" \"" + shorten(text, 50) + "\"");
  });
  if (others > 0)
    report.add(Severity::kWarning, "whitespace",
               first + " has a blank at an end" +
                   (others > 1 ? ", as have " + counted(others - 1, "other text") + " of this fact" : "") +
                   ", which becomes a token of its own; remove it");
}

/// What stands before and behind the subject: glued characters merge with its tokens.
void check_slot(Report& report, const Fact& fact) {
  const size_t slot = fact.prompt.find("{}");
  if (slot == std::string::npos) return;
  const bool alone = says_nothing(fact.prompt.substr(0, slot)) && says_nothing(fact.prompt.substr(slot + 2));
  if (alone)
    report.add(
        Severity::kWarning, "prompt-is-subject",
        "the prompt is nothing but the subject; say which of its properties changes, such as \"{} is located in\"");
  // Particles are glued to words in Korean, Arabic and Hebrew; in Latin to Armenian letters a word is a word.
  const auto glues = [&](size_t at) {
    const char32_t point = point_at(fact.prompt, at);
    return in_spaced_word(fact.prompt, at) && (point < 0x590 || (point >= 0x1E00 && point < 0x2000));
  };
  if ((slot > 0 && glues(slot - 1)) || (slot + 2 < fact.prompt.size() && glues(slot + 2)))
    report.add(Severity::kWarning, "subject-glued",
               "a letter touches {} in \"" + shorten(fact.prompt, 60) +
                   "\" and may share a token with the subject; put a space between");
}

void check_target(Report& report, const Fact& fact) {
  const std::string target = plain(fact.target_new);
  if (target == plain(fact.subject))
    report.add(Severity::kWarning, "target-is-subject", "target_new is the subject itself; check the row");
  const size_t shortest = !target.empty() && spaceless(target, 0) ? 4 : 3;  // in bytes: one character says little
  if (target.size() >= shortest && contains_word(plain(with_subject(fact.prompt, "\n")), target))
    report.add(
        Severity::kWarning, "target-in-prompt",
        "the prompt already says \"" + shorten(fact.target_new, 40) + "\", so a model can copy it; reword the prompt");
  if (fact.target_true) {
    const std::string old = plain(*fact.target_true);
    if (old == target)
      report.add(Severity::kWarning, "target-unchanged",
                 "target_new equals the old answer \"" + shorten(*fact.target_true, 40) +
                     "\": there is nothing to edit; change it or drop the row");
    else if (last_word(old) == last_word(target))
      report.add(Severity::kNote, "shared-ending",
                 "the new and the old answer both end in \"" + last_word(fact.target_new) +
                     "\", so per-token accuracy is above 0 before the edit");
  }
  if (word_count(fact.target_new) > 20)
    report.add(Severity::kNote, "long-target",
               "target_new has " + std::to_string(word_count(fact.target_new)) +
                   " words; locate-then-edit methods are made for short answers");
}

void check_probes(Report& report, const Fact& fact) {
  if (!fact.neighborhood_prompts.empty() && !fact.target_true)
    report.add(Severity::kWarning, "no-old-answer",
               "neighbourhood prompts are scored against target_true, which is missing; add it");
  size_t open = 0;
  for (const auto* prompts : {&fact.paraphrase_prompts, &fact.neighborhood_prompts})
    for (const std::string& prompt : *prompts) open += prompt.find("{}") != prompt.npos ? 1 : 0;
  if (open > 0)
    report.add(
        Severity::kWarning, "slot-in-probe",
        std::to_string(open) +
            " paraphrases or neighbourhood prompts have a {}, which is asked as it stands; write the subject out");
  const std::string subject = plain(fact.subject);
  size_t own = 0;
  for (const std::string& prompt : fact.neighborhood_prompts) own += contains_word(plain(prompt), subject) ? 1 : 0;
  if (own > 0)
    report.add(
        Severity::kWarning, "neighbour-is-subject",
        counted(own, "neighbourhood prompt") + " with the subject itself, whose answer changes; use other subjects");
  std::vector<std::string> seen;
  size_t same = 0;
  for (const std::string& prompt : fact.paraphrase_prompts) {
    same += prompt == fact.full_prompt() || std::ranges::find(seen, prompt) != seen.end() ? 1 : 0;
    seen.push_back(prompt);
  }
  if (same > 0)
    report.add(Severity::kNote, "repeated-paraphrase",
               std::to_string(same) + " paraphrases repeat the prompt or each other; they measure nothing new");
}

Finding about(const FactSet& set, size_t index, Severity severity, const char* check, std::string text) {
  return {severity, check, index, set.facts[index].where(), std::move(text)};
}

/// True if `fact` says and asks nothing that `earlier` does not, but for blanks.
bool adds_nothing(Fact fact, Fact earlier) {
  for (Fact* one : {&fact, &earlier})
    for (const auto member : {&Fact::prompt, &Fact::subject, &Fact::target_new}) one->*member = tidy(one->*member);
  const nlohmann::json own = to_json(fact), known = to_json(earlier);
  return std::ranges::all_of(own.items(), [&](const auto& member) {
    return member.key() == "case_id" || (known.contains(member.key()) && known[member.key()] == member.value());
  });
}

/// Facts that ask for the same thing: once too often, or for different answers.
void check_conflicts(const FactSet& set, std::vector<Finding>& findings) {
  std::unordered_map<std::string, size_t> first_by_question, first_by_relation;
  std::unordered_set<size_t> by_design;
  std::unordered_map<size_t, size_t> group_of;
  for (size_t g = 0; g < set.groups.size(); ++g) {
    const auto& facts = set.groups[g].facts;
    for (const size_t i : facts) group_of[i] = g + 1;
    if (set.groups[g].sequential) by_design.insert(facts.begin(), facts.end());
  }
  for (size_t i = 0; i < set.facts.size(); ++i) {
    const Fact& fact = set.facts[i];
    const auto [question, new_question] = first_by_question.try_emplace(plain(fact.full_prompt()), i);
    const std::string relation_key =
        fact.relation_id.empty() ? std::string() : plain(fact.subject) + "\n" + fact.relation_id;
    const auto [relation, new_relation] = relation_key.empty() ? std::pair(first_by_relation.end(), true)
                                                               : first_by_relation.try_emplace(relation_key, i);
    if (new_question && new_relation) continue;
    const size_t first = new_question ? relation->second : question->second;
    const Fact& earlier = set.facts[first];
    const bool same_answer = plain(earlier.target_new) == plain(fact.target_new);
    if (same_answer && group_of[i] != group_of[first]) continue;  // questions of several hops share hops
    const std::string both =
        new_question ? "the same subject and relation (" + fact.relation_id + ")" : "the same prompt";
    if (same_answer && !new_question) {
      const bool remove = group_of[i] == 0 && adds_nothing(fact, earlier);  // facts of groups stay
      Finding finding = about(set, i, Severity::kWarning, "duplicate",
                              "the same request as at " + earlier.where() +
                                  (remove ? "; remove one" : ", in another spelling or with other fields; keep one"));
      finding.remove = remove;
      findings.push_back(std::move(finding));
    } else if (same_answer) {
      findings.push_back(about(set, i, Severity::kNote, "same-relation",
                               both + " as at " + earlier.where() + ", with the same answer in other words"));
    } else if (by_design.contains(i) && group_of[i] == group_of[first]) {
      findings.push_back(about(set, i, Severity::kNote, "contradiction",
                               both + " as at " + earlier.where() +
                                   " with another answer, as this data set intends; edit one after the other (" +
                                   setting("batch_size", "1") + ")"));
    } else {
      findings.push_back(about(set, i, new_question || by_design.contains(i) ? Severity::kWarning : Severity::kError,
                               "contradiction",
                               both + " as at " + earlier.where() + " but \"" + shorten(fact.target_new, 40) +
                                   "\" instead of \"" + shorten(earlier.target_new, 40) + "\"; keep one"));
    }
  }
}

/// Of several new answers one is edited in.
void check_lists(const FactSet& set, std::vector<Finding>& findings) {
  std::vector<size_t> lists;
  for (size_t i = 0; i < set.facts.size(); ++i) {
    const std::string& answer = set.facts[i].target_new;
    if (set.facts[i].extra.contains("target_new_aliases")) lists.push_back(i);
    if (answer.starts_with("[") && nlohmann::json::parse(answer, nullptr, false).is_array())  // in a cell of a table
      findings.push_back(about(
          set, i, Severity::kWarning, "target-list",
          "target_new is the text " + shorten(answer, 40) + ", and is edited in with its brackets; give one answer"));
  }
  if (lists.empty()) return;
  const std::string others = lists.size() == 1 ? "" : " (as in " + counted(lists.size() - 1, "other fact") + ")";
  findings.push_back(about(set, lists[0], Severity::kWarning, "target-list",
                           "target_new is a list" + others + ", of which \"" +
                               shorten(set.facts[lists[0]].target_new, 40) +
                               "\", the first, is edited in and the rest is neither edited in nor counted as said; "
                               "give one answer"));
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

std::string plain(std::string_view text) {
  std::string result = folded(tidy(text));
  if (result.size() > 1 && result.back() == '.') result.pop_back();
  return result;
}

void require_prompt_size(const std::string& where, std::string_view prompt) {
  constexpr size_t kMost = 32 * 1024;
  if (prompt.size() > kMost)
    refuse({where, "a prompt of " + std::to_string(prompt.size()) + " bytes", "at most " + std::to_string(kMost),
            "write one prompt a line"});
}

std::string_view to_string(Severity severity) noexcept {
  return severity == Severity::kError ? "error" : severity == Severity::kWarning ? "warning" : "note";
}

std::vector<Finding> lint_facts(const FactSet& facts, const std::vector<Finding>& more) {
  std::vector<Finding> findings;
  for (const BadRow& row : facts.bad_rows)  // whose text repeats the place
    findings.push_back({Severity::kError, "unusable-row", Finding::kNoFact, row.where,
                        row.text.starts_with(row.where + ": ") ? row.text.substr(row.where.size() + 2) : row.text});
  if (facts.facts.empty() && facts.bad_rows.empty())
    findings.push_back({Severity::kError, "no-facts", Finding::kNoFact, facts.path,
                        "no usable fact in " + counted(static_cast<size_t>(facts.rows), "row")});
  for (const UnreadKey& key : facts.unread)
    findings.push_back({key.meant.empty() ? Severity::kNote : Severity::kWarning, "unread-key", Finding::kNoFact,
                        key.where, detail::unread_text(key)});
  for (const BadRow& row : facts.skipped)
    findings.push_back({Severity::kWarning, "blank-target", Finding::kNoFact, row.where,
                        "a row without a target, left out: " + row.text});
  for (size_t i = 0; i < facts.facts.size(); ++i) {
    Report report{facts.facts[i], i, findings};
    if (facts.facts[i].renumbered)
      report.add(Severity::kNote, "repeated-case-id",
                 "an earlier row has this case_id, so results call the fact " + std::to_string(facts.facts[i].case_id) +
                     "; give it a number of its own");
    for (const auto check : {check_controls, check_blanks, check_slot, check_target, check_probes})
      check(report, facts.facts[i]);
  }
  check_lists(facts, findings);
  check_conflicts(facts, findings);
  check_shared_keys(facts, findings);
  findings.insert(findings.end(), more.begin(), more.end());
  for (Finding& finding : findings) finding.text = printable(finding.text, false);  // it quotes the facts, on one line
  std::ranges::stable_sort(findings, {}, [](const Finding& one) { return std::pair(line_of(one), one.severity); });
  return findings;
}

int64_t line_of(const Finding& finding) {
  const std::string& where = finding.where;
  const bool row = where.ends_with(']');
  const size_t mark = where.find_last_of(row ? '[' : ':');
  if (mark == std::string::npos) return 0;
  return std::strtoll(where.c_str() + mark + 1, nullptr, 10) + (row ? 1 : 0);
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
  facts.fingerprint = fingerprint(facts.facts, facts.groups);
  if (applied) *applied = count;
  return facts;
}

const std::vector<LintInfo>& lint_checks() {
  static const std::vector<LintInfo> checks = {
      {"blank-target", "warning: a row without a target, which is left out"},
      {"unusable-row", "error: the row is not a fact (subject absent or repeated, wrong type, too long, …)"},
      {"no-facts", "error: there is no usable fact, nor an unusable row that is reported"},
      {"unread-key", "warning: a key is probably a slip of another; note: a key that means nothing in the format"},
      {"repeated-case-id", "note: an earlier row has this case_id, so results give the fact another"},
      {"target-list", "warning: target_new is a list, of which the first is edited in, or the text of one"},
      {"contradiction",
       "error: the same prompt with another answer; warning: the same subject and relation_id with another answer; "
       "note: where the data set intends it"},
      {"duplicate",
       "warning: the same request twice, unless in groups that share it; fixable if the second adds nothing"},
      {"same-relation", "note: the same subject, relation and answer in other words"},
      {"shared-key",
       "note: several facts share the text up to the end of the subject, so their targets are averaged in one batch"},
      {"whitespace",
       "warning, fixable in prompt, subject and target_new: repeated or wide blanks, line breaks; blanks at the ends "
       "of a prompt"},
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
      {"slot-in-probe", "warning: a paraphrase or neighbourhood prompt has a {}, which is asked as it stands"},
      {"repeated-paraphrase", "note: a paraphrase repeats the prompt or another paraphrase"},
  };
  return checks;
}

}  // namespace emend::datasets
