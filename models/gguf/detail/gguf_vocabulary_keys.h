// Vocabularies in GGUF metadata.
#pragma once

#include <emend/models/gguf/gguf_file.h>
#include <emend/models/gguf/gguf_metadata.h>
#include <emend/models/tokenizer/gguf_vocabulary.h>

#include <optional>

namespace emend::models::detail {

/// The vocabulary of an opened file, or nullopt if it has none (tokenizer.ggml.model absent, "none" or "no_vocab").
/// Throws Error(kCorruption) naming file and key.
[[nodiscard]] std::optional<GgufVocabulary> read_gguf_vocabulary(const GgufFile& file);

/// The keys "tokenizer.ggml.…" and the chat template of a vocabulary.
[[nodiscard]] GgufMetadata vocabulary_metadata(const GgufVocabulary& vocabulary);

}  // namespace emend::models::detail
