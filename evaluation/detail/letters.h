// Forms of Unicode text that the published evaluation applies.
#pragma once

#include <string>
#include <string_view>

namespace emend::evaluation::detail {

/// Simple lower-case mapping of every character.
[[nodiscard]] std::string lower_case(std::string_view text);
/// Lower case in form KD, in which what is neither letter, mark nor a sign of mathematics or money is a character of
/// ASCII: typographic quotes, dashes and minus signs are the plain ones, digits of all scripts 0 to 9. Pictures
/// (arrows, emoji) stand between blanks.
[[nodiscard]] std::string plain_letters(std::string_view text);
/// In form KD: the character at `at` is a mark on the one before, or both are of one word in Katakana.
[[nodiscard]] bool goes_on(std::string_view text, size_t at);
/// Ends in a question mark, that of any script, and blanks.
[[nodiscard]] bool is_question(std::string_view text);

}  // namespace emend::evaluation::detail
