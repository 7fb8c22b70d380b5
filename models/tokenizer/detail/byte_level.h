// GPT-2's reversible mapping of bytes to printable characters: space is Ġ, newline is Ċ.
#pragma once

#include <emend/models/tokenizer/detail/piece.h>

#include <array>
#include <string>
#include <string_view>

namespace emend::models::detail {

/// The character (in UTF-8) that stands for each byte.
[[nodiscard]] const std::array<std::string, 256>& byte_level_characters();
/// The byte that `character` stands for, or -1.
[[nodiscard]] int byte_of_character(char32_t character);

/// Every byte replaced by its character.
[[nodiscard]] std::string to_byte_level(std::string_view bytes);
/// The same with origins: each character stands for one byte of `source`.
void to_byte_level(const Piece& source, PieceBuilder& result);
/// The reverse; text with a character outside the mapping is returned as it is.
[[nodiscard]] std::string from_byte_level(std::string_view text);

}  // namespace emend::models::detail
