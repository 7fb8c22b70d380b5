// The head of a model that has none of its own: its weight is the embedding.
#pragma once

#include <emend/models/config.h>
#include <emend/models/family.h>

#include <string>

namespace emend::models {

/// Whether a file's tensor of this name only repeats the embedding: the head's weight where the head is tied. It is
/// never read.
[[nodiscard]] bool repeats_embedding(const FamilySpec& family, const ModelConfig& config, const std::string& name);

}  // namespace emend::models
