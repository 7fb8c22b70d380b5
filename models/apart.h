// Where a loaded model must not be written.
#pragma once

#include <filesystem>

namespace emend::models {

/// Throws Error(kInvalidArgument) if `out` is `source`, the file or folder that a model was loaded from, or lies in it:
/// everything that saves a loaded model, or an edit of it, asks this first.
void require_apart(const std::filesystem::path& out, const std::filesystem::path& source);

}  // namespace emend::models
