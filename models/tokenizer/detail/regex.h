// Patterns of tokenizer files: written for Oniguruma (Ruby syntax), run by PCRE2 (core/regex.h).
#pragma once

#include <emend/core/regex.h>

#include <optional>

namespace emend::models::detail {

/// Rewrites the parts of an Oniguruma pattern that PCRE2 reads differently: \h, \w, \uHHHH, script names, nested
/// classes, (?m). `where`: file and key. Throws Error(kUnsupported) for intersections (&&) and negated nested classes.
[[nodiscard]] std::string translate_pattern(std::string_view pattern, const std::string& where);

/// A compiled pattern or a literal string. Immutable and thread-safe.
class Regex {
 public:
  /// Throws Error(kCorruption) naming `where`, the pattern and the position of the fault.
  Regex(const std::string& pattern, const std::string& where);
  /// Matches `text` itself, which must not be empty.
  [[nodiscard]] static Regex literal(std::string text);

  /// The successive matches in one text. Like Oniguruma's iterator, an empty match right after a match is skipped.
  class Scan {
   public:
    /// `regex` and `text` (valid UTF-8) must outlive the scan.
    Scan(const Regex& regex, std::string_view text);
    /// Sets begin and end and returns true, or returns false at the end of the text.
    /// Throws Error(kInvalidArgument) if matching exceeds the limit on steps or memory.
    [[nodiscard]] bool next(size_t& begin, size_t& end);

   private:
    const Regex& regex_;
    std::string_view text_;
    std::string known_;  // the text with characters that PCRE2 knows, if that differs
    size_t position_ = 0;
    size_t last_end_ = static_cast<size_t>(-1);
  };

 private:
  Regex() = default;
  [[nodiscard]] bool match(std::string_view text, size_t start, size_t& begin, size_t& end) const;

  std::optional<emend::Regex> pattern_;  // absent for a literal
  std::string literal_;
};

}  // namespace emend::models::detail
