// A Hugging Face folder's tokenizer as a GGUF vocabulary.
#pragma once

#include <emend/models/tokenizer/gguf_vocabulary.h>

#include <filesystem>
#include <string>
#include <vector>

namespace emend::models::detail {

struct HfVocabulary {
  GgufVocabulary vocabulary;
  std::vector<std::string> notes;  ///< where the ids may differ from the original's
};

/// Reads the folder's files again for what `tokenizer` does not show: merges, scores, the form of the pre-tokenizer.
///   rows        rows of the embedding; ids without a token become unused "[PAD…]" tokens
///   model_type  tells apart pre-tokenizer names that mean the same
/// Throws Error(kUnsupported) for tokenizers that GGUF has no form for: an unknown pre-tokenizer pattern, a Unigram
/// model.
[[nodiscard]] HfVocabulary hf_vocabulary(const std::filesystem::path& folder, const Tokenizer& tokenizer, int64_t rows,
                                         const std::string& model_type);

}  // namespace emend::models::detail
