#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/models/gguf/detail/hf_vocabulary.h>
#include <emend/models/tokenizer/detail/sources.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <sentencepiece_processor.h>

#include <algorithm>
#include <limits>

namespace emend::models::detail {
namespace {

using Json = nlohmann::json;

constexpr std::array<std::pair<const char*, std::optional<int64_t> GgufVocabulary::*>, 5> kIds = {
    {{"tokenizer.ggml.bos_token_id", &GgufVocabulary::bos},
     {"tokenizer.ggml.eos_token_id", &GgufVocabulary::eos},
     {"tokenizer.ggml.unknown_token_id", &GgufVocabulary::unk},
     {"tokenizer.ggml.padding_token_id", &GgufVocabulary::pad},
     {"tokenizer.ggml.eot_token_id", &GgufVocabulary::eot}}};
constexpr std::array<std::pair<const char*, std::optional<bool> GgufVocabulary::*>, 3> kFlags = {
    {{"tokenizer.ggml.add_bos_token", &GgufVocabulary::add_bos},
     {"tokenizer.ggml.add_eos_token", &GgufVocabulary::add_eos},
     {"tokenizer.ggml.add_space_prefix", &GgufVocabulary::add_space_prefix}}};

using enum GgufVocabulary::TokenType;

/// Drops what does not decide ids, so that equal steps compare equal.
Json essence(Json step) {
  if (!step.is_object()) return step;
  step.erase("trim_offsets");
  if (step.value("type", "") == "ByteLevel") {
    step["use_regex"] = step.value("use_regex", true);
    step["add_prefix_space"] = step.value("add_prefix_space", true);
  }
  if (step.contains("pretokenizers")) {
    for (Json& inner : step["pretokenizers"]) inner = essence(inner);
    if (step["pretokenizers"].size() == 1) return step["pretokenizers"][0];
  }
  return step;
}

bool mentions(const Json& value, const std::string& type) {
  if (value.is_object() && value.value("type", "") == type) return true;
  if (value.is_structured())
    for (const Json& inner : value)
      if (mentions(inner, type)) return true;
  return false;
}

struct PreName {
  std::string name;
  bool same_nfc = true, same_ignore_merges = true;
};

// The name whose meaning is that of the pipeline; names with another normalisation only if there is none better.
PreName pre_name(const PipelineSpec& spec, const std::vector<GgufPre>& own) {
  std::vector<std::string> names{"gpt-2",  "smollm", "llama-bpe", "dbrx",        "qwen2",    "stablelm2",
                                 "falcon", "tekken", "gpt-4o",    "deepseek-v3", "command-r"};
  for (const GgufPre& pre : own) names.insert(names.begin(), pre.name);
  const Json wanted = essence(spec.pre_tokenizer);
  const bool nfc = mentions(spec.normalizer, "NFC");
  std::optional<PreName> best;
  int best_score = -1;
  for (const std::string& name : names) {
    const GgufPre pre = gguf_pre(name, spec.file, &own);
    if (essence(pre.pre_tokenizer) != wanted) continue;
    const PreName found{name, pre.nfc == nfc, pre.ignore_merges == spec.options.ignore_merges};
    const int score = 2 * found.same_ignore_merges + found.same_nfc;
    if (score > best_score) best = found, best_score = score;
  }
  if (best) return *best;
  throw Error(ErrorClass::kUnsupported, {spec.file + ": pre_tokenizer", spec.pre_tokenizer.dump().substr(0, 160),
                                         "a pre-tokenizer that GGUF files have a name for",
                                         "write the model without a vocabulary, or over a GGUF file that has it"});
}

// A token of its own for every row of the embedding.
void fill_rows(GgufVocabulary& vocabulary, int64_t rows) {
  const size_t count = std::max<size_t>(vocabulary.tokens.size(), static_cast<size_t>(rows));
  const size_t had = vocabulary.tokens.size();
  vocabulary.tokens.resize(count);
  vocabulary.token_types.resize(count, kUnused);
  for (size_t id = 0; id < count; ++id)
    if (id >= had || vocabulary.token_types[id] == kUnused) vocabulary.tokens[id] = "[PAD" + std::to_string(id) + "]";
  if (vocabulary.model == "llama") vocabulary.scores.resize(count, -1e9F);
}

void put_special(const Tokenizer& tokenizer, GgufVocabulary& vocabulary, std::vector<std::string>& notes) {
  vocabulary.bos = tokenizer.bos_id();
  vocabulary.eos = tokenizer.eos_id();
  vocabulary.unk = tokenizer.unk_id();
  vocabulary.pad = tokenizer.pad_id();
  for (const bool by_name : {true, false})  // what ends a turn is found by its text, too
    for (const int64_t id : tokenizer.eos_ids())
      if (id != vocabulary.eos && !vocabulary.eot && (!by_name || ends_a_turn(tokenizer.token_text(id))))
        vocabulary.eot = id;
  const auto& prefix = tokenizer.prefix_ids();
  vocabulary.add_bos = tokenizer.adds_bos();
  if (prefix.size() > (tokenizer.adds_bos() ? 1U : 0U))
    notes.emplace_back("the tokens that the tokenizer puts before a text are not kept");
  const auto around = tokenizer.encode_ids("", true);  // what stands in front of a text, and behind it
  const size_t behind = around.size() - prefix.size();
  if (behind == 1 && around.back() == tokenizer.eos_id())
    vocabulary.add_eos = true;
  else if (behind > 0)
    notes.emplace_back("the tokens that the tokenizer puts behind a text are not kept");
  vocabulary.chat_template = tokenizer.chat_template();
}

void put_pieces(const PipelineSpec& spec, GgufVocabulary& vocabulary) {
  const uint32_t pieces = spec.vocabulary.id_end();
  size_t count = pieces;
  for (const AddedToken& token : spec.added) count = std::max<size_t>(count, token.id + 1);
  vocabulary.tokens.resize(count);
  vocabulary.token_types.assign(count, kUnused);
  for (uint32_t id = 0; id < pieces; ++id)
    if (const auto piece = spec.vocabulary.piece(id)) {
      vocabulary.tokens[id] = *piece;
      vocabulary.token_types[id] = spec.options.byte_fallback && byte_of_piece(*piece) >= 0 ? kByte : kNormal;
    }
  for (const AddedToken& token : spec.added) {
    // llama.cpp looks for those that are not special in plain text.
    vocabulary.tokens[token.id] = token.special ? token.content : replace_all(token.content, kMetaspace, " ");
    vocabulary.token_types[token.id] = token.special ? kControl : kUserDefined;
  }
  if (spec.options.unk != kNoToken && spec.options.unk < count) vocabulary.token_types[spec.options.unk] = kUnknown;
}

void put_merges(const PipelineSpec& spec, GgufVocabulary& vocabulary) {
  for (const Merge& merge : spec.merges)
    vocabulary.merges.push_back(std::string(*spec.vocabulary.piece(merge.left)) + " " +
                                std::string(*spec.vocabulary.piece(merge.right)));
}

// SentencePiece's scores order the pieces by when they were merged; the first merge that makes a piece tells the same.
void put_scores(const PipelineSpec& spec, GgufVocabulary& vocabulary) {
  vocabulary.scores.assign(vocabulary.tokens.size(), -1e6F);
  int64_t next = 0;
  for (const Merge& merge : spec.merges)
    if (vocabulary.scores[merge.result] == -1e6F) vocabulary.scores[merge.result] = -static_cast<float>(next++);
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id)
    if (vocabulary.token_types[id] != kNormal) vocabulary.scores[id] = 0;
}

HfVocabulary from_pipeline(const PipelineSpec& spec, const std::vector<GgufPre>& own) {
  HfVocabulary result;
  GgufVocabulary& vocabulary = result.vocabulary;
  put_pieces(spec, vocabulary);
  if (spec.options.byte_fallback) {
    vocabulary.model = "llama";
    vocabulary.pre = "default";
    put_scores(spec, vocabulary);
    const std::string splitter = spec.pre_tokenizer.dump();
    vocabulary.add_space_prefix =
        mentions(spec.normalizer, "Prepend") ||
        (mentions(spec.pre_tokenizer, "Metaspace") && splitter.find("\"never\"") == std::string::npos);
    return result;
  }
  const PreName pre = pre_name(spec, own);
  vocabulary.model = "gpt2";
  vocabulary.pre = pre.name;
  put_merges(spec, vocabulary);
  if (!pre.same_nfc)
    result.notes.emplace_back("text that is not in Unicode normal form C may be tokenised differently from GGUF");
  if (!pre.same_ignore_merges) result.notes.emplace_back("words that are tokens may be merged differently from GGUF");
  return result;
}

HfVocabulary from_sentencepiece(const std::filesystem::path& path, const FolderConfig& config) {
  sentencepiece::SentencePieceProcessor processor;
  read_sentencepiece(path, processor);
  HfVocabulary result;
  GgufVocabulary& vocabulary = result.vocabulary;
  vocabulary.model = "llama";
  vocabulary.pre = "default";
  for (int id = 0; id < processor.GetPieceSize(); ++id) {
    vocabulary.tokens.push_back(processor.IdToPiece(id));
    vocabulary.scores.push_back(processor.GetScore(id));
    vocabulary.token_types.push_back(processor.IsUnknown(id)   ? kUnknown
                                     : processor.IsControl(id) ? kControl
                                     : processor.IsUnused(id)  ? kUnused
                                     : processor.IsByte(id)    ? kByte
                                                               : kNormal);
  }
  vocabulary.add_space_prefix = adds_space(processor);
  const auto add = [&](const std::string& content, int64_t id, bool special) {
    if (id < 0 || id > kMaxTokenId) return;
    if (const auto size = static_cast<size_t>(id) + 1; vocabulary.tokens.size() < size) {
      vocabulary.tokens.resize(size);
      vocabulary.token_types.resize(size, kUnused);
      vocabulary.scores.resize(size, -1e9F);
    }
    vocabulary.tokens[id] = content;
    vocabulary.token_types[id] = special ? kControl : kUserDefined;
    vocabulary.scores[id] = 0;
  };
  for (const AddedToken& token : config.added_tokens()) add(token.content, token.id, token.special);
  for (const auto& [content, id] : config.special_token_ids()) add(content, id, true);
  return result;
}

}  // namespace

HfVocabulary hf_vocabulary(const std::filesystem::path& folder, const Tokenizer& tokenizer, int64_t rows,
                           const std::vector<GgufPre>& own) {
  const FolderConfig config(folder);
  const auto spec = read_pipeline(folder, config);
  HfVocabulary result = spec ? from_pipeline(*spec, own) : from_sentencepiece(folder / "tokenizer.model", config);
  result.vocabulary.source = folder.string();
  fill_rows(result.vocabulary, rows);
  put_special(tokenizer, result.vocabulary, result.notes);
  return result;
}

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
  for (const auto& [key, id] : kIds) vocabulary.*id = file.integer(key);
  for (const auto& [key, flag] : kFlags) vocabulary.*flag = file.flag(key);
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
  for (const auto& [key, id] : kIds)
    if (vocabulary.*id) metadata.set_integer(key, *(vocabulary.*id));
  for (const auto& [key, flag] : kFlags)
    if (vocabulary.*flag) metadata.set_flag(key, *(vocabulary.*flag));
  if (!vocabulary.chat_template.empty()) metadata.set_text("tokenizer.chat_template", vocabulary.chat_template);
  return metadata;
}

}  // namespace emend::models::detail
