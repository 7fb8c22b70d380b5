// Configuration in both directions: GGUF metadata ↔ config.json.
#pragma once

#include <emend/models/config.h>
#include <emend/models/gguf/detail/gguf_architecture.h>
#include <emend/models/gguf/detail/gguf_files.h>
#include <emend/models/gguf/gguf_metadata.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace emend::models::detail {

/// Key under which emend keeps the original config.json (as text), because GGUF has no place for some of its entries.
inline constexpr const char* kConfigKey = "emend.config";
/// "emend.norm.<name>": a norm as the checkpoint had it, where the file's 1 + w lost bits of w.
inline constexpr const char* kNormKey = "emend.norm.";

/// A config.json in the spelling of transformers 4, which version 5 reads too. Sizes that tensors show are taken from
/// them. Throws Error(kCorruption) naming file and key for missing or impossible values.
[[nodiscard]] nlohmann::json config_from_gguf(const GgufFiles& files, const GgufArchitecture& architecture);

/// What config_to_gguf produces.
struct GgufConfig {
  GgufMetadata metadata;                                           ///< keys "ARCHITECTURE.…"
  std::vector<std::pair<std::string, std::vector<float>>> tables;  ///< rotary tables to write as tensors
  std::vector<std::string> notes;                                  ///< what llama.cpp will not do as the model did
};
[[nodiscard]] GgufConfig config_to_gguf(const ModelConfig& config, const GgufArchitecture& architecture);

}  // namespace emend::models::detail
