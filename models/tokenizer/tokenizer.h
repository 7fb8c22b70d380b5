// Tokenizers: text to ids and back, with the byte range of the text that each id stands for.
//
// Goals: the same ids as the reference implementations (Hugging Face tokenizers, sentencepiece, tiktoken) for every
// text; byte offsets into the caller's own text, whatever normalisation happens inside; one immutable object that any
// number of threads may use; at least 10 MB of English text a second on one core.
// Non-goals: training, truncation and padding (batches are padded elsewhere), pairs of sentences.
//
// Where the pieces come from is told in docs/tokenizers.md: tokenizer.json, tokenizer.model, vocab.json with
// merges.txt, *.tiktoken, and the vocabulary of a GGUF file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace emend::models {

/// One token and the bytes [begin, end) of the *original* text that it stands for.
struct TokenSpan {
  int64_t id = 0;
  size_t begin = 0, end = 0;
};

/// The result of Tokenizer::encode: two lists of the same length.
///
/// Offsets are byte ranges [begin, end) in the text given to encode, before any normalisation, in ascending order of
/// begin. Together they cover the text, except for characters that the tokenizer drops. Tokens that stand for no text
/// (added specials, an inserted leading space) have an empty range. Where several tokens share one character, each
/// gets its own bytes if the text was not changed; bytes of a character that normalisation composed all map to the
/// whole composed range, so ranges may then overlap.
struct Encoding {
  std::vector<int64_t> ids;
  std::vector<std::pair<size_t, size_t>> offsets;

  [[nodiscard]] size_t size() const noexcept { return ids.size(); }
  [[nodiscard]] TokenSpan span(size_t index) const {  ///< one token with its bytes
    return {ids.at(index), offsets.at(index).first, offsets.at(index).second};
  }
  /// First and one past the last token that stands for some of the bytes [begin, end); {-1, -1} if none does.
  [[nodiscard]] std::pair<int64_t, int64_t> overlapping(size_t begin, size_t end) const;
};

/// What surrounds the vocabulary: the special ids and the chat template.
struct SpecialTokens {
  std::optional<int64_t> bos, eos, unk, pad;
  bool bos_in_chats = true;         ///< false: its files have "bos_token": null, whatever id the model's config gives
  std::vector<int64_t> eos_ids;     ///< every id that ends a generation; contains `eos`
  std::vector<int64_t> prefix_ids;  ///< what add_special puts in front of the text
  std::vector<int64_t> suffix_ids;  ///< what add_special puts behind the text (usually empty)
  std::string chat_template;        ///< Jinja text; empty if there is none
  std::string chat_template_place;  ///< the file, and the key inside it, that it was read from
};

/// A tokenizer. Immutable after construction and safe to use from many threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  /// Ids and offsets of `text`. Special tokens written out in the text are recognised.
  ///   add_special  also put prefix_ids() before and suffix ids behind, with empty ranges
  /// Throws Error(kInvalidArgument) naming the byte offset if `text` is not valid UTF-8, or if a pattern of the
  /// tokenizer file exceeds the matching limit on this text.
  [[nodiscard]] virtual Encoding encode(std::string_view text, bool add_special = false) const = 0;
  /// A text that goes on: with what stands in front of it, without what stands behind.
  [[nodiscard]] Encoding encode_prompt(std::string_view text) const;
  /// Like encode(), ids only.
  [[nodiscard]] virtual std::vector<int64_t> encode_ids(std::string_view text, bool add_special = false) const {
    return encode(text, add_special).ids;
  }

  /// Text of `ids`, always valid UTF-8 (broken sequences become U+FFFD). Ids without a token are left out, because
  /// models often have a few more rows than the vocabulary has tokens.
  ///   skip_special  leave special tokens out
  /// Throws Error(kInvalidArgument) for a negative id.
  [[nodiscard]] virtual std::string decode(std::span<const int64_t> ids, bool skip_special = false) const = 0;
  /// Text of `ids` behind others: decode() of some tokenizers drops the space in front of a text's first word.
  [[nodiscard]] std::string decode_more(std::span<const int64_t> ids, bool skip_special = false) const;
  /// Text of each of `ids`, to be shown: of the first that is not special as decode() gives it, of those behind as
  /// decode_more() does.
  [[nodiscard]] std::vector<std::string> decode_each(std::span<const int64_t> ids) const;

  /// The piece as the vocabulary writes it ("Ġthe", "▁the", "<0x0A>"), for printing; empty if `id` has no token.
  [[nodiscard]] virtual std::string token_text(int64_t id) const = 0;
  /// The bytes that `id` adds to a text, for streaming: may be part of a character, or empty.
  ///   at_start  nothing of the text has been written yet, so that a leading space may fall away
  [[nodiscard]] virtual std::string token_bytes(int64_t id, bool at_start = false) const = 0;
  /// The id of a piece as the vocabulary writes it, special tokens included.
  [[nodiscard]] virtual std::optional<int64_t> token_id(std::string_view piece) const = 0;
  /// True for tokens that decode(…, skip_special = true) leaves out.
  [[nodiscard]] virtual bool is_special(int64_t id) const = 0;
  /// Largest id + 1.
  [[nodiscard]] virtual int64_t vocab_size() const = 0;

  [[nodiscard]] std::optional<int64_t> bos_id() const { return special_.bos; }
  /// Whether chat templates have it.
  [[nodiscard]] bool bos_in_chats() const { return special_.bos_in_chats; }
  [[nodiscard]] std::optional<int64_t> eos_id() const { return special_.eos; }
  [[nodiscard]] std::optional<int64_t> unk_id() const { return special_.unk; }
  [[nodiscard]] std::optional<int64_t> pad_id() const { return special_.pad; }
  /// Every id that ends a generation (from generation_config.json where there is one).
  [[nodiscard]] const std::vector<int64_t>& eos_ids() const { return special_.eos_ids; }
  /// What add_special puts in front: [BOS] for Llama, [gMASK] sop for ChatGLM3, nothing for GPT-2.
  [[nodiscard]] const std::vector<int64_t>& prefix_ids() const { return special_.prefix_ids; }
  /// True if prefix_ids() contains bos_id().
  [[nodiscard]] bool adds_bos() const;
  /// The Jinja chat template of the model; empty if there is none.
  [[nodiscard]] const std::string& chat_template() const { return special_.chat_template; }
  /// Where that was read from, for messages: "DIR/chat_template.jinja", "FILE.gguf: tokenizer.chat_template".
  [[nodiscard]] const std::string& chat_template_place() const { return special_.chat_template_place; }
  /// SHA-256 (hex) of everything that decides ids: for cache keys.
  [[nodiscard]] const std::string& fingerprint() const { return fingerprint_; }

  /// Writes the files from which load_tokenizer (and transformers) get this tokenizer back into an existing folder:
  /// the original files, or a tokenizer.json made from the GGUF vocabulary. See save_tokenizer.
  virtual void save(const std::filesystem::path& folder) const;
  /// From now on save() writes these files (names and contents), and messages name `place`, for a tokenizer whose own
  /// files are momentary.
  void keep_files(std::vector<std::pair<std::string, std::string>> files, std::string place) {
    kept_ = std::move(files);
    special_.chat_template_place = std::move(place);
  }

 protected:
  Tokenizer() = default;
  SpecialTokens special_;
  std::string fingerprint_;
  std::vector<std::filesystem::path> files_;               ///< what save() copies …
  std::vector<std::pair<std::string, std::string>> kept_;  ///< … unless these are there
};

/// Turns a stream of ids into text that is valid UTF-8 at every step.
/// The concatenated output equals Tokenizer::decode of all ids wherever the bytes form valid UTF-8.
class StreamDecoder {
 public:
  /// `tokenizer` must outlive the decoder.
  ///   at_start  the ids begin a text; otherwise they go on from one, as in Tokenizer::decode_more
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = true, bool at_start = true)
      : tokenizer_(tokenizer), skip_special_(skip_special), at_start_(at_start) {}
  /// The characters completed by `id`; may be empty.
  [[nodiscard]] std::string push(int64_t id);
  /// What is left: one U+FFFD if the stream ended inside a character. The next id begins a text.
  [[nodiscard]] std::string finish();

 private:
  const Tokenizer& tokenizer_;
  bool skip_special_;
  bool at_start_;
  std::string pending_;
};

/// Loads the tokenizer of a checkpoint folder: tokenizer.json, else tokenizer.model, vocab.json + merges.txt, or
/// *.tiktoken; with tokenizer_config.json, special_tokens_map.json, added_tokens.json, generation_config.json and
/// chat_template.jinja where present.
/// Throws Error(kNotFound) if there is none, Error(kCorruption) naming file and key if a file is damaged,
/// Error(kUnsupported) for a kind of tokenizer that emend does not know.
[[nodiscard]] std::unique_ptr<Tokenizer> load_tokenizer(const std::filesystem::path& folder);

/// Writes `tokenizer` into `folder` (made if missing) so that load_tokenizer and transformers give identical ids.
/// A tokenizer that came from a folder has its original files copied; one that came from a GGUF file is written as
/// tokenizer.json and tokenizer_config.json. Throws Error(kIo), Error(kNotFound) if an original file has gone.
void save_tokenizer(const Tokenizer& tokenizer, const std::filesystem::path& folder);

}  // namespace emend::models
