#include <emend/core/utf8.h>
#include <emend/datasets/detail/lint_text.h>
#include <emend/datasets/detail/rows.h>

#include <algorithm>

namespace emend::datasets::detail {

namespace {

constexpr std::string_view kNoBreakSpace = "\xC2\xA0";
/// Zero-width space, joiners' neighbours that only come from copying, soft hyphen, byte-order mark.
constexpr std::string_view kInvisible[] = {"\xE2\x80\x8B", "\xE2\x81\xA0", "\xC2\xAD", "\xEF\xBB\xBF"};

bool has_invisible(std::string_view text) {
  return std::any_of(std::begin(kInvisible), std::end(kInvisible),
                     [&](std::string_view mark) { return text.find(mark) != std::string_view::npos; });
}

size_t word_count(std::string_view text) {
  size_t words = 0;
  bool inside = false;
  for (const char c : text) {
    const bool space = c == ' ' || c == '\n' || c == '\t';
    words += !space && !inside ? 1 : 0;
    inside = !space;
  }
  return words;
}

/// `word` in `text` with no letter or digit on either side (ASCII; other characters count as letters).
bool contains_word(std::string_view text, std::string_view word) {
  const auto letter = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || static_cast<unsigned char>(c) >= 0x80;
  };
  for (size_t at = 0; !word.empty() && (at = text.find(word, at)) != std::string_view::npos; ++at) {
    const bool left = at == 0 || !letter(text[at - 1]);
    const bool right = at + word.size() >= text.size() || !letter(text[at + word.size()]);
    if (left && right) return true;
  }
  return false;
}

std::string last_word(const std::string& text) {
  return text.substr(text.find_last_of(' ') + 1);
}

class Report {
 public:
  Report(const Fact& fact, size_t index, std::vector<Finding>& findings)
      : fact_(fact), index_(index), findings_(findings) {}
  void add(Severity severity, const char* check, std::string text, std::function<void(Fact&)> edit = {}) {
    findings_.push_back({severity, check, index_, fact_.where(), std::move(text), std::move(edit)});
  }

 private:
  const Fact& fact_;
  size_t index_;
  std::vector<Finding>& findings_;
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
                     "\" has blanks at its ends, repeated blanks, line breaks or no-break spaces; use single spaces",
                 [member](Fact& f) { f.*member = tidy(f.*member); });
  };
  one("the prompt", &Fact::prompt);
  one("the subject", &Fact::subject);
  // Long texts (a biography's sentence, an opinion) may have line breaks for a reason.
  if (word_count(fact.target_new) <= 8) one("target_new", &Fact::target_new);
}

/// What stands before and behind the subject: glued characters merge with its tokens.
void check_slot(Report& report, const Fact& fact) {
  const size_t slot = fact.prompt.find("{}");
  if (slot == std::string::npos) return;
  const bool alone = blank(fact.prompt.substr(0, slot)) && blank(fact.prompt.substr(slot + 2));
  if (alone)
    report.add(
        Severity::kWarning, "prompt-is-subject",
        "the prompt is nothing but the subject; say which of its properties changes, such as \"{} is located in\"");
  const char before = slot > 0 ? fact.prompt[slot - 1] : ' ';
  const char behind = slot + 2 < fact.prompt.size() ? fact.prompt[slot + 2] : ' ';
  const auto glues = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  if (glues(before) || glues(behind))
    report.add(Severity::kWarning, "subject-glued",
               "a letter touches {} in \"" + shorten(fact.prompt, 60) +
                   "\" and may share a token with the subject; put a space between");
}

void check_target(Report& report, const Fact& fact) {
  const std::string target = plain(fact.target_new);
  if (target == plain(fact.subject))
    report.add(Severity::kWarning, "target-is-subject", "target_new is the subject itself; check the row");
  std::string around = fact.prompt;
  if (const size_t slot = around.find("{}"); slot != std::string::npos) around.replace(slot, 2, "\n");
  if (target.size() > 2 && contains_word(plain(around), target))
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
  const std::string subject = plain(fact.subject);
  size_t own = 0;
  for (const std::string& prompt : fact.neighborhood_prompts) own += contains_word(plain(prompt), subject) ? 1 : 0;
  if (own > 0)
    report.add(
        Severity::kWarning, "neighbour-is-subject",
        std::to_string(own) + " neighbourhood prompts name the subject, whose answer changes; use other subjects");
  std::vector<std::string> seen;
  size_t same = 0;
  for (const std::string& prompt : fact.paraphrase_prompts) {
    same += prompt == fact.full_prompt() || std::find(seen.begin(), seen.end(), prompt) != seen.end() ? 1 : 0;
    seen.push_back(prompt);
  }
  if (same > 0)
    report.add(Severity::kNote, "repeated-paraphrase",
               std::to_string(same) + " paraphrases repeat the prompt or each other; they measure nothing new");
}

}  // namespace

std::string tidy(std::string_view text) {
  std::string result;
  bool pending = false;
  for (size_t i = 0; i < text.size();) {
    const auto starts = [&](std::string_view mark) { return text.substr(i, mark.size()) == mark; };
    const auto* invisible = std::find_if(std::begin(kInvisible), std::end(kInvisible), starts);
    if (invisible != std::end(kInvisible)) {
      i += invisible->size();
      continue;
    }
    const bool no_break = starts(kNoBreakSpace);
    if (no_break || blank(text.substr(i, 1))) {
      pending = !result.empty();
      i += no_break ? kNoBreakSpace.size() : 1;
      continue;
    }
    if (pending) result += ' ';
    pending = false;
    result += text[i++];
  }
  return result;
}

void each_text(const Fact& fact, const std::function<void(const char* what, const std::string& text)>& look) {
  look("the prompt", fact.prompt);
  look("the subject", fact.subject);
  look("target_new", fact.target_new);
  if (fact.target_true) look("target_true", *fact.target_true);
  const auto list = [&](const char* what, const std::vector<std::string>& texts) {
    for (const std::string& text : texts) look(what, text);
  };
  list("an alias of target_true", fact.target_true_aliases);
  list("a paraphrase", fact.paraphrase_prompts);
  list("a neighbourhood prompt", fact.neighborhood_prompts);
  list("an attribute prompt", fact.attribute_prompts);
  list("a generation prompt", fact.generation_prompts);
  list("a distracting prompt", fact.distracting_prompts);
  for (const auto* probes : {&fact.locality, &fact.portability})
    for (const auto& [name, group] : *probes)
      for (const Probe& probe : group) {
        look("a probe", probe.prompt);
        list("the answer of a probe", probe.answers);
      }
}

void lint_text(const Fact& fact, size_t index, std::vector<Finding>& findings) {
  Report report(fact, index, findings);
  check_controls(report, fact);
  check_blanks(report, fact);
  check_slot(report, fact);
  check_target(report, fact);
  check_probes(report, fact);
}

}  // namespace emend::datasets::detail
