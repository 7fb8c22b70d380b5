// Splitting normalised text into words that are tokenised independently: the "pre_tokenizer" of a tokenizer.json.
#pragma once

#include <emend/models/tokenizer/detail/json_view.h>
#include <emend/models/tokenizer/detail/piece.h>

#include <memory>
#include <vector>

namespace emend::models::detail {

/// One step. Immutable and thread-safe.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  /// Hands the parts of `source`, in order, to `sink`. The pieces are valid only during the call.
  virtual void split(const Piece& source, PieceSink sink) const = 0;
};

struct PreTokenizerChain {
  std::vector<std::unique_ptr<PreTokenizer>> steps;
  /// The last step maps bytes to characters (ByteLevel), and that mapping is left to the model, which does it only
  /// for words that it has not seen: the words handed out are raw bytes.
  bool byte_level = false;
};

/// The steps of the "pre_tokenizer" value `view` (null gives none). Throws Error(kCorruption) or Error(kUnsupported).
[[nodiscard]] PreTokenizerChain make_pre_tokenizers(const JsonView& view);

/// Runs all steps on `source` and hands the non-empty words to `sink`.
void pre_tokenise(const PreTokenizerChain& chain, const Piece& source, PieceSink sink);

}  // namespace emend::models::detail
