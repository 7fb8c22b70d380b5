// The head of a model that has none of its own: its weight is the embedding.
#pragma once

#include <emend/models/checkpoint.h>
#include <emend/models/config.h>
#include <emend/models/family.h>

#include <string>
#include <vector>

namespace emend::models {

/// Whether a file's tensor of this name only repeats the embedding: the head's weight where the head is tied.
[[nodiscard]] bool repeats_embedding(const FamilySpec& family, const ModelConfig& config, const std::string& name);
/// Of the names in a file: the embedding's, and those of heads that repeat it (none where the head is not tied).
struct TiedNames {
  std::string embedding;
  std::vector<std::string> heads;
};
[[nodiscard]] TiedNames tied_names(const FamilySpec& family, const ModelConfig& config,
                                   const std::vector<std::string>& names);
/// Throws Error(kCorruption) where a tensor that should repeat the embedding has other values: it would be lost.
void require_tied(const Checkpoint& checkpoint, const FamilySpec& family, const ModelConfig& config);

}  // namespace emend::models
