// UTF-8 characters and the few character classes that tokenizers ask about.
//
// The reference tokenizers were built with other Unicode versions than PCRE2 and utf8proc; where the class of a
// character matters for an id, the reference wins. The differences are small tables in unicode.cpp.
#pragma once

#include <emend/core/utf8.h>
#include <emend/models/tokenizer/detail/piece.h>

#include <array>

namespace emend::models::detail {

/// U+2581, which stands for a space in SentencePiece vocabularies.
inline constexpr std::string_view kMetaspace = "\xE2\x96\x81";

inline constexpr size_t kNone = static_cast<size_t>(-1);

/// Length of the character that starts with `lead`; `lead` must start a character of valid UTF-8.
[[nodiscard]] inline size_t utf8_length(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}
/// The character at `bytes`, which must be valid UTF-8.
[[nodiscard]] inline char32_t decode_utf8(const char* bytes) {
  const auto at = [bytes](int i) { return static_cast<char32_t>(static_cast<unsigned char>(bytes[i])); };
  switch (utf8_length(bytes[0])) {
    case 1:
      return at(0);
    case 2:
      return (at(0) & 0x1F) << 6 | (at(1) & 0x3F);
    case 3:
      return (at(0) & 0x0F) << 12 | (at(1) & 0x3F) << 6 | (at(2) & 0x3F);
    default:
      return (at(0) & 0x07) << 18 | (at(1) & 0x3F) << 12 | (at(2) & 0x3F) << 6 | (at(3) & 0x3F);
  }
}
void append_utf8(std::string& text, char32_t character);

[[nodiscard]] bool is_white_space(char32_t character);
[[nodiscard]] bool is_numeric(char32_t character);      ///< categories Nd, Nl, No
[[nodiscard]] bool is_punctuation(char32_t character);  ///< ASCII punctuation and category P as of Unicode 8
[[nodiscard]] bool is_word(char32_t character);         ///< letters, marks, digits, connectors

/// Start of the last character of `text`, which must not be empty.
[[nodiscard]] size_t last_character(std::string_view text);
/// Where the white space that ends at `end`, or that starts at `begin`, starts or ends.
[[nodiscard]] size_t white_space_before(std::string_view text, size_t end);
[[nodiscard]] size_t white_space_after(std::string_view text, size_t begin);

/// Combining marks that the reference's normaliser does not know yet and treats as ordinary characters.
[[nodiscard]] bool is_recent_mark(char32_t character);

/// For matching with PCRE2, whose Unicode version is older than the reference's: replaces characters that PCRE2 does
/// not know by known ones of the same category and length, in `copy`. False, and `copy` untouched, if `text` has none.
[[nodiscard]] bool with_known_characters(std::string_view text, std::string& copy);

/// Throws Error(kInvalidArgument) naming the byte offset unless `text` is valid UTF-8 and shorter than 4 GiB.
void check_text(std::string_view text);
/// Throws Error(kInvalidArgument) for a negative id.
void check_id(int64_t id);

// GPT-2's reversible mapping of bytes to printable characters: space is Ġ, newline is Ċ.

/// The character (in UTF-8) that stands for each byte.
[[nodiscard]] const std::array<std::string, 256>& byte_level_characters();

/// Every byte replaced by its character.
[[nodiscard]] std::string to_byte_level(std::string_view bytes);
/// The same with origins: each character stands for one byte of `source`.
void to_byte_level(const Piece& source, PieceBuilder& result);
/// The reverse; text with a character outside the mapping is returned as it is.
[[nodiscard]] std::string from_byte_level(std::string_view text);

}  // namespace emend::models::detail
