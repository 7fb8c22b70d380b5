// Checks of the text of a single fact.
#pragma once

#include <emend/datasets/lint.h>

#include <string>
#include <string_view>
#include <vector>

namespace emend::datasets::detail {

/// Collapses runs of white space (and no-break spaces) to one space, drops zero-width characters, trims.
[[nodiscard]] std::string tidy(std::string_view text);

/// Calls `look` with what it is ("the subject", "a paraphrase") and each text of a fact that a model may be given.
void each_text(const Fact& fact, const std::function<void(const char* what, const std::string& text)>& look);

/// Appends findings about the fact at `index`.
void lint_text(const Fact& fact, size_t index, std::vector<Finding>& findings);

}  // namespace emend::datasets::detail
