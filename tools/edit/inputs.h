// From options to the things that an edit needs: hyper-parameters, contexts, statistics.
#pragma once

#include <emend/editors/contexts.h>
#include <emend/editors/statistics.h>
#include <emend/hparams/raw.h>
#include <emend/models/checkpoint.h>

#include <memory>
#include <optional>

#include "options.h"

namespace emend::tools {

/// The file, the named preset, or the preset that fits the model; with --set applied.
/// Throws Error(kNotFound) listing the presets that exist if nothing was named and none fits.
[[nodiscard]] hparams::RawHparams editor_hparams(const std::string& editor, const std::string& file_or_name,
                                                 const std::vector<std::string>& set,
                                                 const models::Checkpoint& checkpoint, const models::Model* model,
                                                 const Common& common);

/// Null if no file was named.
[[nodiscard]] std::optional<editors::ContextTemplates> named_contexts(const std::string& path);

/// Computed by all processes of a group together.
[[nodiscard]] std::unique_ptr<editors::StatisticsProvider> statistics_provider(const EditOptions& options,
                                                                               const Common& common);

/// A short name for files and reports: the folder's or file's name.
[[nodiscard]] std::string short_model_name(const models::Checkpoint& checkpoint);

}  // namespace emend::tools
