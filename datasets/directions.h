// The presets of `emend direct`: questions, pairs of instructions, scorers.
#pragma once

#include <string_view>

namespace emend::datasets {

/// The text of datasets/emend_directions.json, part of the library:
///   {"questions": ["…"], "test_questions": ["…"],
///    "presets": [{"name", "about", "positive": system message, "negative": system message, "scorer": {…}}]}
/// A preset may have questions and test_questions of its own, and a list of prompts instead of each system message.
[[nodiscard]] std::string_view bundled_directions();

}  // namespace emend::datasets
