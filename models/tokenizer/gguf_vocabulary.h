// The vocabulary of a GGUF file as plain data, and the tokenizer made from it. The GGUF reader fills the struct; this
// file knows nothing of the container.
#pragma once

#include <emend/models/tokenizer/tokenizer.h>

namespace emend::models {

struct GgufPre;

/// Keys "tokenizer.ggml.…" of a GGUF file, one field each; the key is named where it differs.
struct GgufVocabulary {
  enum TokenType : int32_t { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

  std::string source;                ///< the file's path, for error texts
  std::string name;                  ///< "general.name"; only tells Phi-3 from others
  std::string model;                 ///< "gpt2" (byte-level BPE) or "llama" (SentencePiece BPE)
  std::string pre;                   ///< pre-tokenizer name for "gpt2"; empty means "default"
  std::vector<std::string> tokens;   ///< pieces, index = id
  std::vector<float> scores;         ///< "llama" needs them; empty otherwise
  std::vector<int32_t> token_types;  ///< token_type: of each token; or empty, if all are normal
  std::vector<std::string> merges;   ///< "a b" strings, best first; a "gpt2" vocabulary of single bytes has none
  std::optional<int64_t> bos, eos, unk, pad;  ///< bos_token_id, eos_token_id, unknown_token_id, padding_token_id
  std::optional<int64_t> eot;                 ///< eot_token_id: a further id that ends a turn
  std::optional<bool> add_bos, add_eos;       ///< add_bos_token, add_eos_token
  std::optional<bool> add_space_prefix;       ///< default: true for "llama"
  std::string chat_template;                  ///< chat_template
};

/// Whether a special token with this text ends an answer in the families that use it ("<|eot_id|>", "<|end|>").
[[nodiscard]] bool ends_a_turn(std::string_view text);

/// Builds the tokenizer. `own` are the pre-tokenizers of a family that is not in families.def. Throws
/// Error(kUnsupported) for an unknown `model` or `pre`, listing the known names, and Error(kCorruption) naming the key
/// for a vocabulary that contradicts itself.
[[nodiscard]] std::unique_ptr<Tokenizer> tokenizer_from_gguf(const GgufVocabulary& vocabulary,
                                                             const std::vector<GgufPre>* own = nullptr);

}  // namespace emend::models
