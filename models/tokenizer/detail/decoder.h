// From pieces back to text: the "decoder" of a tokenizer.json.
#pragma once

#include <emend/models/tokenizer/detail/json_view.h>

#include <memory>
#include <string>
#include <vector>

namespace emend::models::detail {

/// One step. Immutable and thread-safe.
class DecodeStep {
 public:
  virtual ~DecodeStep() = default;
  /// Changes the pieces of a whole text. Pieces go in and come out as valid UTF-8.
  virtual void apply(std::vector<std::string>& pieces) const = 0;
  /// Changes one piece of a stream; bytes may come out that are only part of a character.
  ///   at_start  nothing of the text has been written yet
  virtual void apply_one(std::string& piece, bool at_start) const = 0;
};

/// Immutable and thread-safe.
class DecoderChain {
 public:
  /// From the "decoder" value; null joins pieces with spaces. Throws Error(kCorruption) or Error(kUnsupported).
  explicit DecoderChain(const JsonView& view);

  [[nodiscard]] std::string decode(std::vector<std::string> pieces) const;
  [[nodiscard]] std::string decode_one(std::string piece, bool at_start) const;

 private:
  std::vector<std::unique_ptr<DecodeStep>> steps_;
};

/// The byte of a piece "<0xNN>", or -1.
[[nodiscard]] int byte_of_piece(std::string_view piece);

}  // namespace emend::models::detail
