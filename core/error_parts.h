// The four parts of an error's text, for programs that show or translate them (the Python package does).
#pragma once

#include <emend/core/error.h>

namespace emend {

/// Where, got, expected, advice. Exact for the error that was thrown last on this thread; for others the text is taken
/// apart at its separators, and what cannot be told apart stays in `got`.
[[nodiscard]] ErrorParts parts_of(const Error& error);

}  // namespace emend
