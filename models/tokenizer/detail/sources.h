// Where a folder's tokenizer can come from, besides tokenizer.json.
#pragma once

#include <emend/models/tokenizer/detail/folder_config.h>
#include <emend/models/tokenizer/detail/pipeline.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <filesystem>
#include <memory>

namespace emend::models::detail {

/// vocab.json and merges.txt; the class in tokenizer_config.json tells GPT-2 from Qwen2.
[[nodiscard]] PipelineSpec read_vocab_and_merges(const std::filesystem::path& folder, const FolderConfig& config);
/// A file of lines "base64 rank": Qwen (*.tiktoken) and GLM-4 (tokenizer.model).
[[nodiscard]] PipelineSpec read_tiktoken(const std::filesystem::path& path, const FolderConfig& config);
/// True if the file starts as such a file does.
[[nodiscard]] bool looks_like_tiktoken(const std::filesystem::path& path);
/// A SentencePiece model, with ChatGLM's tokens if the configuration asks for them.
[[nodiscard]] std::unique_ptr<Tokenizer> load_sentencepiece(const std::filesystem::path& path,
                                                            const FolderConfig& config);

/// Pre-tokenizer values of well-known models.
[[nodiscard]] nlohmann::json byte_level_pre_tokenizer(bool add_prefix_space, bool use_regex);
[[nodiscard]] nlohmann::json split_pre_tokenizer(const std::string& pattern);  ///< Split by regex, then ByteLevel
[[nodiscard]] nlohmann::json byte_level_decoder();
extern const char* const kQwen2Pattern;
extern const char* const kLlama3Pattern;

}  // namespace emend::models::detail
