// UTF-8 checks for text that comes from outside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace emend {

/// Offset of the first byte that is not part of well-formed UTF-8 (no overlong forms, no surrogates, at most U+10FFFF);
/// nothing if all of `text` is well formed.
[[nodiscard]] std::optional<size_t> first_invalid_utf8(std::string_view text) noexcept;

/// `bytes` with every maximal broken sequence replaced by U+FFFD.
[[nodiscard]] std::string repair_utf8(std::string_view bytes);

/// `text` of others as people may see it: what would steer a terminal or turn the direction of the text (control
/// characters, escape sequences, C1 codes, bidirectional marks and overrides, line and paragraph separators) becomes
/// "\u001b", a byte that is not UTF-8 "\xff". Tabs stay, and line breaks unless `lines` is false. JSON text stays the
/// same JSON.
[[nodiscard]] std::string printable(std::string_view text, bool lines = true);

/// True if printable(text) is `text`.
[[nodiscard]] inline bool is_printable(std::string_view text, bool lines = true) {
  return printable(text, lines) == text;
}

/// Without case and in form KC, in which "É", "é" and "e" with a combining accent are one, as are typographic and plain
/// apostrophes and full and half width. For comparing; text that is not UTF-8 stays.
[[nodiscard]] std::string folded(std::string_view text);

/// Nothing but white space and invisible characters, of any script.
[[nodiscard]] bool says_nothing(std::string_view text);

/// The character that holds byte `at` of a text, which must be in it; 0 where it is none.
[[nodiscard]] char32_t point_at(std::string_view text, size_t at) noexcept;
/// It is of a script that writes words without spaces (Chinese, Japanese, Thai, …).
[[nodiscard]] bool spaceless(std::string_view text, size_t at) noexcept;
/// It belongs to a word that spaces set apart from others: a letter, mark or digit of any other script.
[[nodiscard]] bool in_spaced_word(std::string_view text, size_t at) noexcept;

/// What some programs write in front of a text.
inline constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

struct Utf8Character {
  std::optional<char32_t> code;  ///< nothing for a byte that begins no character
  size_t size = 1;               ///< in bytes
};
/// The character that begins at `at`, which must be in `text`.
[[nodiscard]] Utf8Character character_at(std::string_view text, size_t at) noexcept;

/// Length of the incomplete character at the end of `bytes` (0 to 3): a prefix of some valid character.
[[nodiscard]] size_t incomplete_tail(std::string_view bytes) noexcept;

/// True if every byte is below 0x80.
[[nodiscard]] bool is_ascii(std::string_view text) noexcept;

/// 1-based number of the line that holds byte `offset` ('\n' ends a line).
[[nodiscard]] int64_t line_of_offset(std::string_view text, size_t offset) noexcept;

/// Unicode normalisation form KD, as the published methods and evaluations apply to generated text; what is not UTF-8
/// becomes U+FFFD.
[[nodiscard]] std::string compatibility_form(std::string_view text);

}  // namespace emend
