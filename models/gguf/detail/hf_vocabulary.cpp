#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/models/gguf/detail/hf_vocabulary.h>
#include <emend/models/tokenizer/detail/gguf_pre.h>
#include <emend/models/tokenizer/detail/sources.h>
#include <sentencepiece_processor.h>

#include <algorithm>
#include <optional>

namespace emend::models::detail {
namespace {

using Json = nlohmann::json;

constexpr const char* kMetaspace = "\xE2\x96\x81";
enum TokenType : int32_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

bool is_file(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

// The folder's pipeline, or nothing if its tokenizer is a SentencePiece model.
std::optional<PipelineSpec> pipeline_of(const std::filesystem::path& folder) {
  const FolderConfig config(folder);
  std::optional<PipelineSpec> spec;
  if (is_file(folder / "tokenizer.json")) {
    spec = read_tokenizer_json(folder / "tokenizer.json");
  } else if (is_file(folder / "tokenizer.model")) {
    if (!looks_like_tiktoken(folder / "tokenizer.model")) return std::nullopt;
    spec = read_tiktoken(folder / "tokenizer.model", config);
  } else if (is_file(folder / "vocab.json")) {
    spec = read_vocab_and_merges(folder, config);
  } else {
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.path().extension() == ".tiktoken") spec = read_tiktoken(entry.path(), config);
  }
  if (spec) config.apply(*spec);
  return spec;
}

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
PreName pre_name(const PipelineSpec& spec, const std::string& model_type) {
  std::vector<std::string> names{"gpt-2",  "smollm", "llama-bpe", "dbrx",        "qwen2",    "stablelm2",
                                 "falcon", "tekken", "gpt-4o",    "deepseek-v3", "command-r"};
  if (model_type == "chatglm" || model_type == "glm") names.insert(names.begin(), "chatglm-bpe");
  if (model_type == "glm4") names.insert(names.begin(), "glm4");
  const Json wanted = essence(spec.pre_tokenizer);
  const bool nfc = mentions(spec.normalizer, "NFC");
  std::optional<PreName> best;
  int best_score = -1;
  for (const std::string& name : names) {
    const GgufPre pre = gguf_pre(name, spec.file);
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
  for (const int64_t id : tokenizer.eos_ids())
    if (id != vocabulary.eos && !vocabulary.eot) vocabulary.eot = id;
  const auto& prefix = tokenizer.prefix_ids();
  vocabulary.add_bos = tokenizer.adds_bos();
  if (prefix.size() > (tokenizer.adds_bos() ? 1U : 0U))
    notes.emplace_back("the tokens that the tokenizer puts before a text are not kept");
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
      const bool byte =
          spec.options.byte_fallback && piece->size() == 6 && piece->starts_with("<0x") && piece->ends_with(">");
      vocabulary.token_types[id] = byte ? kByte : kNormal;
    }
  for (const AddedToken& token : spec.added) {
    std::string content = token.content;
    if (!token.special)  // llama.cpp looks for these in plain text
      for (size_t at = 0; (at = content.find(kMetaspace, at)) != std::string::npos;) content.replace(at, 3, " ");
    vocabulary.tokens[token.id] = content;
    vocabulary.token_types[token.id] = token.special ? kControl : kUserDefined;
  }
  if (spec.options.unk != kNoToken && spec.options.unk < count) vocabulary.token_types[spec.options.unk] = kUnknown;
}

void put_merges(const PipelineSpec& spec, GgufVocabulary& vocabulary) {
  std::vector<Merge> merges = spec.merges;
  std::stable_sort(merges.begin(), merges.end(), [](const Merge& a, const Merge& b) { return a.rank < b.rank; });
  for (const Merge& merge : merges)
    vocabulary.merges.push_back(std::string(*spec.vocabulary.piece(merge.left)) + " " +
                                std::string(*spec.vocabulary.piece(merge.right)));
}

// SentencePiece's scores order the pieces by when they were merged; the first merge that makes a piece tells the same.
void put_scores(const PipelineSpec& spec, GgufVocabulary& vocabulary) {
  std::vector<Merge> merges = spec.merges;
  std::stable_sort(merges.begin(), merges.end(), [](const Merge& a, const Merge& b) { return a.rank < b.rank; });
  vocabulary.scores.assign(vocabulary.tokens.size(), -1e6F);
  int64_t next = 0;
  for (const Merge& merge : merges)
    if (vocabulary.scores[merge.result] == -1e6F) vocabulary.scores[merge.result] = -static_cast<float>(next++);
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id)
    if (vocabulary.token_types[id] != kNormal) vocabulary.scores[id] = 0;
}

HfVocabulary from_pipeline(const PipelineSpec& spec, const std::string& model_type) {
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
  const PreName pre = pre_name(spec, model_type);
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
  if (const auto status = processor.LoadFromSerializedProto(read_file(path)); !status.ok())
    throw Error(ErrorClass::kCorruption, {path.string(), "not a SentencePiece model (" + status.ToString() + ")",
                                          "a tokenizer.model", "get the file again"});
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
  const auto pieces = processor.EncodeAsPieces("a");
  vocabulary.add_space_prefix = !pieces.empty() && pieces[0].starts_with(kMetaspace);
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
                           const std::string& model_type) {
  const auto spec = pipeline_of(folder);
  HfVocabulary result =
      spec ? from_pipeline(*spec, model_type) : from_sentencepiece(folder / "tokenizer.model", FolderConfig(folder));
  result.vocabulary.source = folder.string();
  fill_rows(result.vocabulary, rows);
  put_special(tokenizer, result.vocabulary, result.notes);
  return result;
}

}  // namespace emend::models::detail
