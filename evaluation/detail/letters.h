// Forms of Unicode text that the published evaluation applies.
#pragma once

#include <string>
#include <string_view>

namespace emend::evaluation::detail {

/// Simple lower-case mapping of every character.
[[nodiscard]] std::string lower_case(std::string_view text);
/// Unicode normalisation form KD, as the published evaluation applies to generated text.
[[nodiscard]] std::string compatibility_form(std::string_view text);

}  // namespace emend::evaluation::detail
