// Writing a tokenizer.json that Hugging Face tokenizers loads with identical ids.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/pipeline.h>

#include <algorithm>

namespace emend::models::detail {
namespace {

using nlohmann::json;

json added_token(const AddedToken& token) {
  return {{"id", token.id},          {"content", token.content}, {"single_word", token.single_word},
          {"lstrip", token.lstrip},  {"rstrip", token.rstrip},   {"normalized", token.normalized},
          {"special", token.special}};
}

json model_of(const Bpe& bpe) {
  const Vocabulary& vocabulary = bpe.vocabulary();
  json pieces = json::object(), merges = json::array();
  for (uint32_t id = 0; id < vocabulary.id_end(); ++id) {
    const auto piece = vocabulary.piece(id);
    if (piece && vocabulary.find(*piece) == id) pieces[std::string(*piece)] = id;
  }
  for (const Merge& merge : bpe.merges().sorted())
    merges.push_back({*vocabulary.piece(merge.left), *vocabulary.piece(merge.right)});
  const BpeOptions& options = bpe.options();
  const json unk = options.unk == kNoToken ? json(nullptr) : json(*vocabulary.piece(options.unk));
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", unk},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", options.fuse_unk},
          {"byte_fallback", options.byte_fallback},
          {"ignore_merges", options.ignore_merges},
          {"vocab", pieces},
          {"merges", merges}};
}

std::string piece_of(const TokenizerJsonParts& parts, int64_t id) {
  for (const AddedToken& token : parts.added)
    if (token.id == id) return token.content;
  return std::string(parts.bpe.vocabulary().piece(static_cast<uint32_t>(id)).value_or(""));
}

json config_of(const TokenizerJsonParts& parts) {
  json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
  const SpecialTokens& special = parts.special;
  const auto name = [&](const char* key, const std::optional<int64_t>& id) {
    if (id) config[key] = piece_of(parts, *id);
  };
  name("bos_token", special.bos);
  name("eos_token", special.eos);
  name("unk_token", special.unk);
  name("pad_token", special.pad);
  if (!special.chat_template.empty()) config["chat_template"] = special.chat_template;
  return config;
}

}  // namespace

void write_tokenizer_json(const TokenizerJsonParts& parts, const std::filesystem::path& folder) {
  json added = json::array();
  std::vector<AddedToken> tokens = parts.added;
  std::sort(tokens.begin(), tokens.end(), [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
  for (const AddedToken& token : tokens) added.push_back(added_token(token));
  const json document = {{"version", "1.0"},
                         {"truncation", nullptr},
                         {"padding", nullptr},
                         {"added_tokens", added},
                         {"normalizer", parts.normalizer},
                         {"pre_tokenizer", parts.pre_tokenizer},
                         {"post_processor", parts.post_processor},
                         {"decoder", parts.decoder},
                         {"model", model_of(parts.bpe)}};
  write_file(folder / "tokenizer.json", document.dump() + "\n");
  write_file(folder / "tokenizer_config.json", config_of(parts).dump(2) + "\n");
}

void copy_files(const std::vector<std::filesystem::path>& files, const std::filesystem::path& folder) {
  for (const auto& file : files) {
    const auto target = folder / file.filename();
    std::error_code ignored;
    if (std::filesystem::equivalent(file, target, ignored)) continue;
    write_file(target, read_file(file));
  }
}

}  // namespace emend::models::detail
