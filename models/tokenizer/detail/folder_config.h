// The small files beside a tokenizer: which tokens are special, what is added around a text, the chat template.
#pragma once

#include <emend/models/tokenizer/detail/added_tokens.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <functional>
#include <nlohmann/json.hpp>

namespace emend::models::detail {

struct PipelineSpec;
class JsonView;

class FolderConfig {
 public:
  /// Reads what is there of tokenizer_config.json, special_tokens_map.json, added_tokens.json,
  /// generation_config.json, config.json and chat_template.jinja. Throws Error(kCorruption) naming file and key.
  explicit FolderConfig(const std::filesystem::path& folder);

  [[nodiscard]] const std::string& tokenizer_class() const { return class_; }
  /// The text of "bos_token", "eos_token", …; nothing if it is not named or null.
  [[nodiscard]] std::optional<std::string> special_text(const std::string& key) const;
  /// A truth value of tokenizer_config.json, if it is there.
  [[nodiscard]] std::optional<bool> flag(const std::string& key) const;
  /// An id of tokenizer_config.json, if it is there.
  [[nodiscard]] std::optional<int64_t> id(const std::string& key) const;
  /// Tokens of added_tokens_decoder and added_tokens.json with their ids, in order of ids.
  [[nodiscard]] const std::vector<AddedToken>& added_tokens() const { return added_; }
  /// "special_tokens" of tokenizer_config.json: pieces and ids (ChatGLM).
  [[nodiscard]] std::vector<std::pair<std::string, int64_t>> special_token_ids() const;

  using FindId = std::function<std::optional<int64_t>(const std::string&)>;
  /// Sets bos, eos, unk, pad, eos_ids, chat_template and its place; `find` gives the id of a piece.
  void fill(SpecialTokens& special, const FindId& find) const;
  /// Adds the tokens that the files name to `spec`, sets its special ids, and puts BOS and EOS into its post-processor
  /// as add_bos_token and add_eos_token say, which count for the Llama and Gemma classes of transformers and, with
  /// `no_post_processor`, for vocab.json with merges.txt.
  void apply(PipelineSpec& spec, bool no_post_processor = false) const;

  /// The files of the folder that save() copies: `main` and the small files above, without the model's own.
  [[nodiscard]] std::vector<std::filesystem::path> files(const std::vector<std::string>& main) const;

 private:
  void read_added_tokens();
  [[nodiscard]] JsonView tokenizer_config() const;
  [[nodiscard]] std::string chat_template(std::string& place) const;

  std::filesystem::path folder_;
  nlohmann::json config_, map_, generation_, model_config_;
  std::string class_;
  std::vector<AddedToken> added_;
};

}  // namespace emend::models::detail
