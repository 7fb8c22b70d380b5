// Where a loaded model must not be written.
#pragma once

#include <filesystem>

namespace emend::models {

/// Whether `path` is `folder` or lies in it; both canonical.
[[nodiscard]] bool is_within(const std::filesystem::path& path, const std::filesystem::path& folder);

/// Throws Error(kInvalidArgument) if `out` is `source`, the file or folder that a model was loaded from, or lies in it:
/// everything that saves a loaded model, or an edit of it, asks this first.
void require_apart(const std::filesystem::path& out, const std::filesystem::path& source);

}  // namespace emend::models
