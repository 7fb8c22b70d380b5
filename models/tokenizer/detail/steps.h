// The steps of a tokenizer.json around its model: "normalizer", "pre_tokenizer", "post_processor" and "decoder". All
// are immutable and thread-safe. What makes them throws Error(kCorruption) or Error(kUnsupported) naming file and key.
#pragma once

#include <emend/core/json.h>
#include <emend/models/tokenizer/detail/piece.h>
#include <emend/models/tokenizer/detail/regex.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <functional>

namespace emend::models::detail {

// Reading a JSON document whose faults are reported with file and key: "tokenizer.json: model.vocab: …".

/// "Sequence" steps within one another, at most.
inline constexpr int kMaxSequenceDepth = 32;

/// A value in a JSON document that knows its file and key path. Cheap to copy; the document must outlive it.
class JsonView {
 public:
  JsonView(const nlohmann::json& value, std::string file, std::string path = "")
      : value_(&value), file_(std::move(file)), path_(std::move(path)) {}

  /// "FILE: key PATH", for messages.
  [[nodiscard]] std::string where() const { return path_.empty() ? file_ : file_ + ": key \"" + path_ + "\""; }
  [[nodiscard]] const nlohmann::json& value() const { return *value_; }
  [[nodiscard]] bool is_null() const { return value_->is_null(); }

  /// True if this is an object with a non-null member `key`.
  [[nodiscard]] bool has(const std::string& key) const;
  /// The member `key`. Throws Error(kCorruption) if this is no object or the member is missing.
  [[nodiscard]] JsonView at(const std::string& key) const;
  /// The elements of an array. Throws otherwise.
  [[nodiscard]] std::vector<JsonView> elements() const;
  [[nodiscard]] JsonView element(size_t i) const {  ///< of an array that has it
    return {(*value_)[i], file_, path_ + "[" + std::to_string(i) + "]"};
  }

  [[nodiscard]] const std::string& string() const;
  [[nodiscard]] int64_t integer(int64_t lowest, int64_t highest) const;
  [[nodiscard]] bool boolean() const;
  [[nodiscard]] bool boolean_or(const std::string& key, bool fallback) const {
    return has(key) ? at(key).boolean() : fallback;
  }
  [[nodiscard]] std::string string_or(const std::string& key, const std::string& fallback) const {
    return has(key) ? at(key).string() : fallback;
  }

  /// Throws Error(kCorruption): this value is `got` where `expected` should be.
  [[noreturn]] void fail(const std::string& expected) const;
  /// Throws Error(kUnsupported): valid, but not something emend can do.
  [[noreturn]] void unsupported(const std::string& what, const std::string& expected) const;

 private:
  const nlohmann::json* value_;
  std::string file_, path_;
};

/// Calls visit(step, its type) for the step `view`, or all of a "Sequence" (a list under `key`); none for null.
template <class Visit>
void for_each_step(const JsonView& view, const char* key, const Visit& visit, int depth = 0) {
  if (depth == 0 && view.is_null()) return;
  const std::string& type = view.at("type").string();
  if (type != "Sequence") return visit(view, type);
  if (depth > kMaxSequenceDepth) view.fail("sequences nested at most " + std::to_string(kMaxSequenceDepth) + " deep");
  for (const JsonView& step : view.at(key).elements()) for_each_step(step, key, visit, depth + 1);
}

/// A "pattern" value: {"String": "…"} or {"Regex": "…"}. Null for an empty string, which matches nothing.
[[nodiscard]] std::shared_ptr<const Regex> make_pattern(const JsonView& view);
/// A value that is a text of one character.
[[nodiscard]] std::string one_character(const JsonView& view);

// ---- normalizer

/// Which Unicode tables decide what composes.
enum class ComposeTables {
  kReference,  ///< as Hugging Face tokenizers do: marks newer than Unicode 9 stay where they are
  kUnicode,    ///< as the Unicode standard says
};

/// Writes the normalised text to `result` and returns true, or returns false if nothing changes.
using Normalizer = std::function<bool(const Piece& source, PieceBuilder& result)>;
using NormalizerChain = std::vector<Normalizer>;

/// NFC (compose), NFD, NFKC (compose, compatibility) or NFKD. Characters that combine are normalised together, and
/// all bytes of the result stand for all bytes of that group; everything else keeps its own place.
[[nodiscard]] Normalizer make_unicode_form(bool compose, bool compatibility, ComposeTables tables);
/// Puts `text` in front, unless there is none.
[[nodiscard]] Normalizer make_prepend(const std::string& text);
/// Puts `content` in the place of every match.
[[nodiscard]] Normalizer make_replace(std::shared_ptr<const Regex> pattern, const std::string& content);
/// Every byte becomes the character that stands for it (to_byte_level).
[[nodiscard]] bool byte_level(const Piece& source, PieceBuilder& result);
[[nodiscard]] NormalizerChain make_normalizers(const JsonView& view, ComposeTables tables);

/// The longest text that rules may make of `bytes` bytes; those of real tokenizers stay at a few times.
constexpr size_t longest_text(size_t bytes) {
  return 64 * bytes + 65536;
}
/// Throws Error(kUnsupported): `what` ("normalizer") makes more than `most` bytes of a text.
[[noreturn]] void refuse_growth(const char* what, size_t most);

/// Runs the chain on `source` and hands the result to `sink`. Throws Error(kUnsupported) beyond longest_text.
void normalise(const NormalizerChain& chain, const Piece& source, PieceSink sink);
/// The same for a string without origins.
[[nodiscard]] std::string normalise(const NormalizerChain& chain, std::string_view text);

// ---- pre_tokenizer: words that are tokenised independently

/// Hands the parts of `source`, in order, to `sink`. The pieces are valid only during the call.
using PreTokenizer = std::function<void(const Piece& source, PieceSink sink)>;

struct PreTokenizerChain {
  std::vector<PreTokenizer> steps;
  /// The last step maps bytes to characters (ByteLevel), and that mapping is left to the model, which does it only
  /// for words that it has not seen: the words handed out are raw bytes.
  bool byte_level = false;
};

[[nodiscard]] PreTokenizerChain make_pre_tokenizers(const JsonView& view);
/// Runs all steps on `source` and hands the non-empty words to `sink`.
void pre_tokenise(const PreTokenizerChain& chain, const Piece& source, PieceSink sink);

// ---- post_processor: what is put around a text

/// Appends to special.prefix_ids and special.suffix_ids what the value puts around one text. ByteLevel steps only trim
/// offsets in the reference; ours always cover the text, so they have no effect.
void read_post_processor(const JsonView& view, SpecialTokens& special, int depth = 0);
/// A TemplateProcessing value that puts `prefix` and `suffix` (pieces with their ids) around a text.
[[nodiscard]] nlohmann::json template_processor(const std::vector<std::pair<std::string, int64_t>>& prefix,
                                                const std::vector<std::pair<std::string, int64_t>>& suffix);

// ---- decoder: from pieces back to text

struct DecodeStep {
  /// Changes one piece of a stream; bytes may come out that are only part of a character. Empty: nothing to do.
  ///   at_start  nothing of the text has been written yet
  std::function<void(std::string& piece, bool at_start)> one;
  /// Changes the pieces of a whole text, which go in and come out as valid UTF-8. Empty: `one` for each of them.
  std::function<void(std::vector<std::string>& pieces)> all;
};

class DecoderChain {
 public:
  /// From the "decoder" value; null joins pieces with spaces.
  explicit DecoderChain(const JsonView& view);

  [[nodiscard]] std::string decode(std::vector<std::string> pieces) const;
  [[nodiscard]] std::string decode_one(std::string piece, bool at_start) const;

 private:
  std::vector<DecodeStep> steps_;
};

/// The byte of a piece "<0xNN>", or -1.
[[nodiscard]] int byte_of_piece(std::string_view piece);

}  // namespace emend::models::detail
