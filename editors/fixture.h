// Checks the editors against recorded numbers of the published implementations.
#pragma once

#include <emend/core/log.h>
#include <emend/editors/editor.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

namespace emend::editors {

/// Says whether a variant of an editor on a model is wanted.
using FixtureFilter =
    std::function<bool(const std::string& model, const std::string& editor, const std::string& variant)>;

/// `folder` holds models, facts, contexts, second moments, hyper-parameters and expected tensors in the format of the
/// editor fixtures (expected.MODEL.EDITOR.safetensors …). For each model and editor found:
///   {"memit": {"max_abs_diff": {"z": 1e-5, …}, "relative": {…}, "within_tolerance": true, "failures": [...]}, …}
/// Editors that this build does not have are listed under "missing". `wanted` leaves out what is not asked for (the
/// reference engine is slow).
[[nodiscard]] nlohmann::json eval_editor_fixture(const std::filesystem::path& folder, Engine engine = Engine::kFast,
                                                 const Log& log = {}, const FixtureFilter& wanted = {});

}  // namespace emend::editors
