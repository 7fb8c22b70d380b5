// Regular expressions of Unicode text: PCRE2 with its JIT, with limits on steps and memory.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace emend {

/// A compiled pattern (UTF-8, Unicode classes). Immutable, cheap to copy, safe for many threads. Texts must be valid
/// UTF-8. Matching throws Error(kInvalidArgument) naming `where` if it exceeds the limits.
class Regex {
 public:
  /// Throws Error(kCorruption) naming `where`, the pattern and the position of the fault. `lines`: ^ and $ match at
  /// every line, as in Ruby.
  explicit Regex(const std::string& pattern, std::string where = "pattern", bool lines = false);

  /// The first match at or after `start`: sets begin and end. False if there is none.
  [[nodiscard]] bool match(std::string_view text, size_t start, size_t& begin, size_t& end) const;
  /// Replaces every match; "$1" … in `replacement` stand for groups, "$0" for the match.
  [[nodiscard]] std::string replace_all(std::string_view text, const std::string& replacement) const;
  /// All matches of a pattern that does not match the empty text.
  [[nodiscard]] std::vector<std::string> find_all(std::string_view text) const;

 private:
  struct Code;
  [[noreturn]] void give_up(int reason, size_t start) const;

  std::shared_ptr<const Code> code_;
  std::string pattern_, where_;
};

}  // namespace emend
