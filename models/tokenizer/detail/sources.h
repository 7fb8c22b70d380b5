// Where a folder's tokenizer comes from.
#pragma once

#include <emend/models/gguf/gguf_form.h>
#include <emend/models/tokenizer/detail/folder_config.h>
#include <emend/models/tokenizer/detail/pipeline.h>

namespace sentencepiece {
class SentencePieceProcessor;
}

namespace emend::models::detail {

/// The folder's tokenizer, configuration applied and with the files that save() copies; nothing if it is a
/// SentencePiece model. Throws Error(kNotFound) if there is none.
[[nodiscard]] std::optional<PipelineSpec> read_pipeline(const std::filesystem::path& folder,
                                                        const FolderConfig& config);
/// Reads a SentencePiece model, and returns the file's bytes. Throws Error(kCorruption) naming the file.
std::string read_sentencepiece(const std::filesystem::path& path, sentencepiece::SentencePieceProcessor& processor);
/// Whether the model puts a space in front of a text's first word.
[[nodiscard]] bool adds_space(const sentencepiece::SentencePieceProcessor& processor);
/// A SentencePiece model, with ChatGLM's tokens if the configuration asks for them.
[[nodiscard]] std::unique_ptr<Tokenizer> load_sentencepiece(const std::filesystem::path& path,
                                                            const FolderConfig& config);

/// What a name in "tokenizer.ggml.pre" stands for: one of `own` (a family that is not in families.def), of the
/// families, or of vocabularies that many share. Throws Error(kUnsupported) naming `file`, with the closest name.
[[nodiscard]] GgufPre gguf_pre(const std::string& name, const std::string& file,
                               const std::vector<GgufPre>* own = nullptr);

/// Pre-tokenizer values of well-known models.
[[nodiscard]] nlohmann::json byte_level_pre_tokenizer(bool add_prefix_space, bool use_regex);
[[nodiscard]] nlohmann::json split_step(const std::string& pattern);           ///< Split by regex
[[nodiscard]] nlohmann::json split_pre_tokenizer(const std::string& pattern);  ///< the same, then ByteLevel
[[nodiscard]] inline nlohmann::json byte_level_decoder() {
  return byte_level_pre_tokenizer(true, true);
}
extern const char* const kQwen2Pattern;
extern const char* const kLlama3Pattern;

}  // namespace emend::models::detail
