// Looks for requests that cannot work or will not do what their author expects, without a model.
//
// What a model tells (is the target already the top answer?) comes in from outside, as findings.
#pragma once

#include <emend/datasets/fact.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace emend::datasets {

enum class Severity {
  kError,    ///< editing these facts as they are gives a wrong result
  kWarning,  ///< probably not what is meant
  kNote,     ///< worth knowing
};
[[nodiscard]] std::string_view to_string(Severity severity) noexcept;  ///< "error", "warning", …

/// One remark about one fact.
struct Finding {
  static constexpr size_t kNoFact = static_cast<size_t>(-1);

  Severity severity = Severity::kWarning;
  std::string check;      ///< "subject-whitespace", "contradiction", …; see lint_checks()
  size_t fact = kNoFact;  ///< index into FactSet::facts; kNoFact for a row that is not a usable fact
  std::string where;      ///< "facts.json:12", "facts[11]"
  std::string text;       ///< what is wrong and what to do
  /// The clear remedy, if there is one: `edit` changes the fact, or `remove` takes it out.
  std::function<void(Fact&)> edit = {};
  bool remove = false;
  [[nodiscard]] bool fixable() const { return remove || static_cast<bool>(edit); }
};

/// Composed (NFC), white space tidied, ASCII in lower case, without a full stop at the end: prompts, subjects and
/// answers that are equal so are one and the same wherever facts are compared.
[[nodiscard]] std::string plain(std::string_view text);

/// Throws Error(kInvalidArgument) for a prompt that a model would read for minutes: more than 32 KiB.
void require_prompt_size(const std::string& where, std::string_view prompt);

/// Findings in the order of the file, errors before warnings on the same line, with `more` among them. Rows in
/// `facts.bad_rows` are errors, and so is a set without facts.
[[nodiscard]] std::vector<Finding> lint_facts(const FactSet& facts, const std::vector<Finding>& more = {});

/// The line of the file (the number of the row, where rows were no text) that a finding is about; 0: of none.
[[nodiscard]] int64_t line_of(const Finding& finding);

/// Applies every fixable finding; the fingerprint is renewed. Facts of groups are never removed. `applied` counts the
/// fixes.
[[nodiscard]] FactSet fix_facts(FactSet facts, const std::vector<Finding>& findings, size_t* applied = nullptr);

/// `text`, from which `facts` were read with `options`, with every fixable finding applied. All other bytes stay as
/// they are, and so is a row in which a fix has no place (a row of several answers), of which `unmended` gets the
/// place. Nothing for a table. Throws Error(kUnsupported) for a format of which no fact can be written.
[[nodiscard]] std::optional<std::string> fix_text(std::string_view text, const FactSet& facts,
                                                  const std::vector<Finding>& findings, const ReadOptions& options = {},
                                                  std::vector<std::string>* unmended = nullptr);

/// Names and meanings of the built-in checks, for help and docs.
struct LintInfo {
  std::string name, meaning;
};
[[nodiscard]] const std::vector<LintInfo>& lint_checks();  ///< the table

}  // namespace emend::datasets
