// Short ways to read facts from a text, and to look at what is refused.
#pragma once

#include <emend/datasets/fact.h>

#include "support/error_of.h"

namespace emend::datasets {

inline FactSet read(const std::string& text, const ReadOptions& options = {}) {
  return parse_facts(text, "f.json", options);
}

using testing::expect_parts;

inline std::string refusal(const std::string& text, const ReadOptions& options = {},
                           ErrorClass error_class = ErrorClass::kCorruption) {
  return testing::error_of([&] { (void)read(text, options); }, error_class);
}

}  // namespace emend::datasets
