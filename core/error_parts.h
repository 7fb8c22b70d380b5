// The four parts of an error's text, for programs that show or translate them (the Python package does), and the class
// of what the operating system refuses.
#pragma once

#include <emend/core/error.h>

namespace emend {

/// Where, got, expected, advice. Exact for the error that was thrown last on this thread; for others the text is taken
/// apart at its separators, and what cannot be told apart stays in `got`.
[[nodiscard]] ErrorParts parts_of(const Error& error);

/// kDevice where memory is what lacks (ENOMEM), kIo for every other errno.
[[nodiscard]] ErrorClass class_of_errno(int error) noexcept;

}  // namespace emend
