// Checks of the text of a single fact.
#pragma once

#include <emend/datasets/lint.h>

#include <string>
#include <string_view>
#include <vector>

namespace emend::datasets::detail {

/// Collapses runs of white space (and no-break spaces) to one space, drops zero-width characters, trims.
[[nodiscard]] std::string tidy(std::string_view text);
/// Lower-case ASCII of tidy(), without a full stop at the end: for comparing answers.
[[nodiscard]] std::string plain(std::string_view text);

/// Appends findings about the fact at `index`.
void lint_text(const Fact& fact, size_t index, std::vector<Finding>& findings);

}  // namespace emend::datasets::detail
