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

/// Length of the incomplete character at the end of `bytes` (0 to 3): a prefix of some valid character.
[[nodiscard]] size_t incomplete_tail(std::string_view bytes) noexcept;

/// True if every byte is below 0x80.
[[nodiscard]] bool is_ascii(std::string_view text) noexcept;

/// 1-based number of the line that holds byte `offset` ('\n' ends a line).
[[nodiscard]] int64_t line_of_offset(std::string_view text, size_t offset) noexcept;

}  // namespace emend
