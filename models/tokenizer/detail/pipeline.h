// The tokenizer that Hugging Face's tokenizer.json describes: added tokens, normaliser, pre-tokenizer, BPE,
// post-processor and decoder. Every other source but SentencePiece models is brought into this form too.
#pragma once

#include <emend/models/tokenizer/detail/added_tokens.h>
#include <emend/models/tokenizer/detail/bpe.h>
#include <emend/models/tokenizer/detail/steps.h>

#include <filesystem>
#include <unordered_map>

namespace emend::models::detail {

/// Everything that makes a pipeline. The small parts are kept as they stand in a tokenizer.json.
struct PipelineSpec {
  std::string file;  ///< where it comes from, for messages
  nlohmann::json normalizer, pre_tokenizer, post_processor, decoder;
  ComposeTables compose = ComposeTables::kReference;
  Vocabulary vocabulary;
  std::vector<Merge> merges;  ///< best first
  BpeOptions options;         ///< byte_level is set from the pre-tokenizer
  std::vector<AddedToken> added;
  SpecialTokens special;                     ///< prefix_ids and suffix_ids are set from the post-processor
  std::vector<std::filesystem::path> files;  ///< what save() copies; empty: it writes a tokenizer.json

  /// Appends the merge of two pieces into the one that both make; false, and nothing, unless all three are pieces.
  [[nodiscard]] bool add_merge(std::string_view left, std::string_view right);
  /// The id of an added token or a piece, or kNoToken.
  [[nodiscard]] uint32_t find(std::string_view piece) const;
  /// Adds a token the way the reference does: one that is a piece keeps its id, else it gets the next free one.
  /// Adding a token again replaces its flags.
  void add_token(AddedToken token);
  /// Adds a token that has its id already. Throws Error(kCorruption) naming `where` if a piece has that id.
  void add_token_with_id(AddedToken token, const std::string& where);

 private:
  void insert(AddedToken token);

  std::unordered_map<std::string, size_t> added_index_;  // content to place in `added`
  uint32_t next_id_ = 0;
};

/// Checks and builds. Throws Error(kCorruption) naming file and key, Error(kUnsupported).
[[nodiscard]] std::unique_ptr<Tokenizer> make_pipeline(PipelineSpec spec);

/// Reads a tokenizer.json. Throws as load_tokenizer does.
[[nodiscard]] PipelineSpec read_tokenizer_json(const std::filesystem::path& path);
/// Parses the text of a tokenizer.json; `file` is for messages.
[[nodiscard]] PipelineSpec parse_tokenizer_json(std::string_view text, const std::string& file);

/// Adds the members of an object of pieces and ids.
void read_pieces(const JsonView& view, Vocabulary& vocabulary);
/// An entry of "added_tokens" or "added_tokens_decoder", without its id.
[[nodiscard]] AddedToken read_added_token(const JsonView& view);

/// Writes tokenizer.json and tokenizer_config.json for a pipeline that did not come from a folder. Throws Error(kIo).
void write_tokenizer_json(const PipelineSpec& spec, const std::filesystem::path& folder);

}  // namespace emend::models::detail
