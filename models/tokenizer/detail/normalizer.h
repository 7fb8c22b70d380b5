// Normalisation of text before it is split: the "normalizer" of a tokenizer.json.
#pragma once

#include <emend/models/tokenizer/detail/json_view.h>
#include <emend/models/tokenizer/detail/piece.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace emend::models::detail {

/// Which Unicode tables decide what composes.
enum class ComposeTables {
  kReference,  ///< as Hugging Face tokenizers do: marks newer than Unicode 9 stay where they are
  kUnicode,    ///< as the Unicode standard says
};

/// One step. Immutable and thread-safe.
class Normalizer {
 public:
  virtual ~Normalizer() = default;
  /// Writes the normalised text to `result` and returns true, or returns false if nothing changes.
  [[nodiscard]] virtual bool apply(const Piece& source, PieceBuilder& result) const = 0;
};

using NormalizerChain = std::vector<std::unique_ptr<Normalizer>>;

/// The steps of the "normalizer" value `view` (null gives none). Throws Error(kCorruption) or Error(kUnsupported).
[[nodiscard]] NormalizerChain make_normalizers(const JsonView& view, ComposeTables tables);

/// Runs the chain on `source` and hands the result to `sink`.
void normalise(const NormalizerChain& chain, const Piece& source, PieceSink sink);
/// The same for a string without origins.
[[nodiscard]] std::string normalise(const NormalizerChain& chain, std::string_view text);

}  // namespace emend::models::detail
