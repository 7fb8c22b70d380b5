// Unicode regular expressions over PCRE2: global replacement and all matches.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace emend::evaluation::detail {

/// A compiled pattern (UTF-8, Unicode classes). Immutable; safe for many threads.
class Regex {
 public:
  explicit Regex(const std::string& pattern);
  /// Replaces every match; "$1" … in `replacement` stand for groups, "$0" for the match.
  [[nodiscard]] std::string replace_all(std::string_view text, const std::string& replacement) const;
  [[nodiscard]] std::vector<std::string> find_all(std::string_view text) const;

 private:
  std::shared_ptr<void> code_;
};

/// `text` with broken UTF-8 sequences replaced by U+FFFD.
[[nodiscard]] std::string valid_utf8(std::string_view text);
/// Simple lower-case mapping of every character.
[[nodiscard]] std::string lower_case(std::string_view text);
/// Unicode normalisation form KD, as the published evaluation applies to generated text.
[[nodiscard]] std::string compatibility_form(std::string_view text);

}  // namespace emend::evaluation::detail
