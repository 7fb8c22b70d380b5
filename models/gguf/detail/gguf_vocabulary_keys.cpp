#include <emend/models/gguf/detail/gguf_vocabulary_keys.h>

#include <limits>

namespace emend::models::detail {

std::optional<GgufVocabulary> read_gguf_vocabulary(const GgufFile& file) {
  const std::string model = file.text("tokenizer.ggml.model").value_or("none");
  if (model == "none" || model == "no_vocab") return std::nullopt;
  GgufVocabulary vocabulary;
  vocabulary.source = file.path().string();
  vocabulary.name = file.text("general.name").value_or("");
  vocabulary.model = model;
  vocabulary.pre = file.text("tokenizer.ggml.pre").value_or("");
  vocabulary.tokens = file.texts("tokenizer.ggml.tokens");
  if (vocabulary.tokens.empty()) file.fail_key("tokenizer.ggml.tokens", "missing or empty", "a list of pieces");
  for (const double score : file.numbers("tokenizer.ggml.scores"))
    vocabulary.scores.push_back(static_cast<float>(score));
  for (const int64_t type : file.integers("tokenizer.ggml.token_type")) {
    if (type < 0 || type > std::numeric_limits<int32_t>::max())
      file.fail_key("tokenizer.ggml.token_type", std::to_string(type), "a type from 1 to 6");
    vocabulary.token_types.push_back(static_cast<int32_t>(type));
  }
  if (model == "gpt2" && !file.find("tokenizer.ggml.merges"))
    file.fail_key("tokenizer.ggml.merges", "no merges", "the list of merges that \"gpt2\" vocabularies have");
  vocabulary.merges = file.texts("tokenizer.ggml.merges");
  vocabulary.bos = file.integer("tokenizer.ggml.bos_token_id");
  vocabulary.eos = file.integer("tokenizer.ggml.eos_token_id");
  vocabulary.unk = file.integer("tokenizer.ggml.unknown_token_id");
  vocabulary.pad = file.integer("tokenizer.ggml.padding_token_id");
  vocabulary.eot = file.integer("tokenizer.ggml.eot_token_id");
  vocabulary.add_bos = file.flag("tokenizer.ggml.add_bos_token");
  vocabulary.add_eos = file.flag("tokenizer.ggml.add_eos_token");
  vocabulary.add_space_prefix = file.flag("tokenizer.ggml.add_space_prefix");
  vocabulary.chat_template = file.text("tokenizer.chat_template").value_or("");
  return vocabulary;
}

GgufMetadata vocabulary_metadata(const GgufVocabulary& vocabulary) {
  GgufMetadata metadata;
  metadata.set_text("tokenizer.ggml.model", vocabulary.model);
  if (!vocabulary.pre.empty()) metadata.set_text("tokenizer.ggml.pre", vocabulary.pre);
  metadata.set_texts("tokenizer.ggml.tokens", vocabulary.tokens);
  if (!vocabulary.scores.empty()) metadata.set_numbers("tokenizer.ggml.scores", vocabulary.scores);
  if (!vocabulary.token_types.empty()) metadata.set_integers("tokenizer.ggml.token_type", vocabulary.token_types);
  if (vocabulary.model == "gpt2" || !vocabulary.merges.empty())  // a vocabulary of single bytes has none
    metadata.set_texts("tokenizer.ggml.merges", vocabulary.merges);
  const auto id = [&](const char* key, const std::optional<int64_t>& value) {
    if (value) metadata.set_integer(key, *value);
  };
  id("tokenizer.ggml.bos_token_id", vocabulary.bos);
  id("tokenizer.ggml.eos_token_id", vocabulary.eos);
  id("tokenizer.ggml.unknown_token_id", vocabulary.unk);
  id("tokenizer.ggml.padding_token_id", vocabulary.pad);
  id("tokenizer.ggml.eot_token_id", vocabulary.eot);
  if (vocabulary.add_bos) metadata.set_flag("tokenizer.ggml.add_bos_token", *vocabulary.add_bos);
  if (vocabulary.add_eos) metadata.set_flag("tokenizer.ggml.add_eos_token", *vocabulary.add_eos);
  if (vocabulary.add_space_prefix) metadata.set_flag("tokenizer.ggml.add_space_prefix", *vocabulary.add_space_prefix);
  if (!vocabulary.chat_template.empty()) metadata.set_text("tokenizer.chat_template", vocabulary.chat_template);
  return metadata;
}

}  // namespace emend::models::detail
