// Vocabularies in GGUF metadata, and a Hugging Face folder's tokenizer as such a vocabulary.
#pragma once

#include <emend/models/gguf/gguf_form.h>
#include <emend/models/tokenizer/gguf_vocabulary.h>

#include <filesystem>

namespace emend::models::detail {

// The tokenizer files of a Hugging Face folder inside a GGUF file, beside the vocabulary that llama.cpp reads.
//
// GGUF has no place for normalizers, flags of added tokens, or ids that code puts around a text (ChatGLM). The key
// "emend.tokenizer" holds the original files, as a list "name, content, name, content, …"; the content of a file that
// is not UTF-8 is written in hexadecimal digits and its name begins with "hex:".

inline constexpr const char* kTokenizerKey = "emend.tokenizer";

/// The value of the key for a tokenizer that came from a folder.
[[nodiscard]] std::vector<std::string> keep_tokenizer(const Tokenizer& tokenizer);

/// The tokenizer that a file keeps, or null if it keeps none. It gives the ids of the original and saves its files.
///   config  the model's config.json, which some tokenizers read
/// Throws Error(kCorruption) naming file and key.
[[nodiscard]] std::unique_ptr<Tokenizer> kept_tokenizer(const GgufFile& file, const nlohmann::json& config);

/// The vocabulary of an opened file, or nullopt if it has none (tokenizer.ggml.model absent, "none" or "no_vocab").
/// Throws Error(kCorruption) naming file and key.
[[nodiscard]] std::optional<GgufVocabulary> read_gguf_vocabulary(const GgufFile& file);

/// The keys "tokenizer.ggml.…" and the chat template of a vocabulary.
[[nodiscard]] GgufMetadata vocabulary_metadata(const GgufVocabulary& vocabulary);

struct HfVocabulary {
  GgufVocabulary vocabulary;
  std::vector<std::string> notes;  ///< where the ids may differ from the original's
};

/// Reads the folder's files again for what `tokenizer` does not show: merges, scores, the form of the pre-tokenizer.
///   rows  rows of the embedding; ids without a token become unused "[PAD…]" tokens
///   own   the family's pre-tokenizers, whose names come before others that mean the same
/// Throws Error(kUnsupported) for what GGUF has no form for: an unknown pre-tokenizer pattern, a Unigram model.
[[nodiscard]] HfVocabulary hf_vocabulary(const std::filesystem::path& folder, const Tokenizer& tokenizer, int64_t rows,
                                         const std::vector<GgufPre>& own = {});

}  // namespace emend::models::detail
