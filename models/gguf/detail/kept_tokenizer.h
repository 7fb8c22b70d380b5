// The tokenizer files of a Hugging Face folder inside a GGUF file, beside the vocabulary that llama.cpp reads.
//
// GGUF has no place for normalizers, flags of added tokens, or ids that code puts around a text (ChatGLM). The key
// "emend.tokenizer" holds the original files, as a list "name, content, name, content, …"; the content of a file that
// is not UTF-8 is written in hexadecimal digits and its name begins with "hex:".
#pragma once

#include <emend/models/gguf/gguf_file.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::models::detail {

inline constexpr const char* kTokenizerKey = "emend.tokenizer";

/// The value of the key for a tokenizer that came from a folder.
[[nodiscard]] std::vector<std::string> keep_tokenizer(const Tokenizer& tokenizer);

/// The tokenizer that a file keeps, or null if it keeps none. It gives the ids of the original and saves its files.
///   config  the model's config.json, which some tokenizers read
/// Throws Error(kCorruption) naming file and key.
[[nodiscard]] std::unique_ptr<Tokenizer> kept_tokenizer(const GgufFile& file, const nlohmann::json& config);

}  // namespace emend::models::detail
