// UTF-8 checks for text that comes from outside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace emend {

/// Offset of the first byte that is not part of well-formed UTF-8 (no overlong forms, no surrogates, at most U+10FFFF);
/// nothing if all of `text` is well formed.
[[nodiscard]] std::optional<size_t> first_invalid_utf8(std::string_view text) noexcept;

/// 1-based number of the line that holds byte `offset` ('\n' ends a line).
[[nodiscard]] int64_t line_of_offset(std::string_view text, size_t offset) noexcept;

}  // namespace emend
