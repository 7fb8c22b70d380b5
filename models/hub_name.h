// Models in the Hugging Face cache, by the names that people gave.
#pragma once

#include <filesystem>
#include <string>

namespace emend::models {

/// "ORG/NAME" of a folder that is a snapshot in a Hugging Face cache (models--ORG--NAME/snapshots/REVISION); empty for
/// any other path.
[[nodiscard]] std::string hub_name(const std::filesystem::path& folder);

/// What people call a model: ORG/NAME, the name of its folder, or that of its file without ".gguf".
[[nodiscard]] std::string model_name(const std::filesystem::path& path);

}  // namespace emend::models
