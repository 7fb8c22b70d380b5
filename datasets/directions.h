// The presets of `emend direct`: questions, pairs of instructions, scorers.
#pragma once

#include <string_view>

namespace emend::datasets {

/// The text of datasets/emend_directions.json, part of the library:
///   {"questions": ["…"], "test_questions": ["…"],
///    "presets": [{"name", "about", "positive": system message, "negative": system message, "scorer": {…}}]}
[[nodiscard]] std::string_view bundled_directions();

}  // namespace emend::datasets
