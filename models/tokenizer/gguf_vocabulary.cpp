#include <emend/core/text.h>
#include <emend/models/family.h>
#include <emend/models/tokenizer/detail/sources.h>
#include <emend/models/tokenizer/detail/steps.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <emend/models/tokenizer/gguf_vocabulary.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

namespace emend::models {
namespace {

using detail::kNoToken;
using detail::PipelineSpec;
using nlohmann::json;

using enum GgufVocabulary::TokenType;

[[noreturn]] void damaged(const GgufVocabulary& source, const std::string& key, const std::string& got,
                          const std::string& expected) {
  throw Error(ErrorClass::kCorruption,
              {source.source + ": key \"tokenizer.ggml." + key + "\"", got, expected, "get the file again"});
}

int32_t type_of(const GgufVocabulary& source, size_t id) {
  return source.token_types.empty() ? kNormal : source.token_types[id];
}

void check_texts(const GgufVocabulary& source) {
  const auto check = [&](const std::vector<std::string>& texts, const char* key) {
    for (size_t i = 0; i < texts.size(); ++i)
      if (first_invalid_utf8(texts[i]))
        damaged(source, std::string(key) + "[" + std::to_string(i) + "]", "bytes that are not valid UTF-8",
                "text in UTF-8");
  };
  check(source.tokens, "tokens");
  check(source.merges, "merges");
}

void check_sizes(const GgufVocabulary& source) {
  const size_t count = source.tokens.size();
  if (count == 0) damaged(source, "tokens", "no tokens", "a vocabulary");
  if (count > static_cast<size_t>(detail::kMaxTokenId))
    damaged(source, "tokens", std::to_string(count) + " tokens", "fewer");
  const auto same = [&](size_t size, const char* key) {
    if (size != 0 && size != count)
      damaged(source, key, std::to_string(size) + " values", std::to_string(count) + ", one for each token");
  };
  same(source.scores.size(), "scores");
  same(source.token_types.size(), "token_type");
  const auto id = [&](const std::optional<int64_t>& value, const char* key) {
    if (value && (*value < 0 || *value >= static_cast<int64_t>(count)))
      damaged(source, key, "id " + std::to_string(*value), "an id below " + std::to_string(count));
  };
  id(source.bos, "bos_token_id");
  id(source.eos, "eos_token_id");
  id(source.unk, "unknown_token_id");
  id(source.pad, "padding_token_id");
  id(source.eot, "eot_token_id");
}

void add_tokens(const GgufVocabulary& source, PipelineSpec& spec) {
  // Phi-3's special tokens take the white space behind them; the file has no place to say so.
  std::string name = lower(source.name);  // "Phi-3-mini-4k-instruct", "Phi 3 Mini 4k Instruct"
  std::erase_if(name, [](char c) { return c == ' ' || c == '-' || c == '_'; });
  const bool phi3 = name.find("phi3") != std::string::npos;
  spec.vocabulary.reserve(source.tokens.size());
  for (size_t id = 0; id < source.tokens.size(); ++id)
    spec.vocabulary.add(source.tokens[id], static_cast<uint32_t>(id));
  for (size_t id = 0; id < source.tokens.size(); ++id) {
    const int32_t type = type_of(source, id);
    if (type != kControl && type != kUserDefined && type != kUnknown) continue;
    if (spec.vocabulary.find(source.tokens[id]) != id) continue;  // a repeated piece
    detail::AddedToken token;
    token.content = source.tokens[id];
    token.special = type != kUserDefined;
    token.rstrip =
        phi3 && token.special && token.content != "<unk>" && token.content != "<s>" && token.content != "<|endoftext|>";
    spec.add_token(std::move(token));
  }
}

// A vocabulary of single characters has no merges; any other one needs them.
void require_merges(const GgufVocabulary& source) {
  for (size_t id = 0; source.merges.empty() && id < source.tokens.size(); ++id) {
    if (type_of(source, id) == kNormal && width_of(source.tokens[id]) > 1)
      damaged(source, "merges", "no merges", "the list of merges that \"gpt2\" vocabularies have");
  }
}

void read_merges(const GgufVocabulary& source, PipelineSpec& spec) {
  require_merges(source);
  spec.merges.reserve(source.merges.size());
  for (size_t i = 0; i < source.merges.size(); ++i) {
    const std::string& text = source.merges[i];
    const size_t space = text.find(' ', 1);  // a piece may itself be a space
    if (!spec.add_merge(text.substr(0, space), space == std::string::npos ? "" : text.substr(space + 1)))
      damaged(source, "merges[" + std::to_string(i) + "]", "got \"" + shorten(text) + "\"",
              "two tokens that make a third");
  }
}

// SentencePiece merges whatever makes the piece with the best score; equal scores go from left to right.
void rank_by_score(const GgufVocabulary& source, PipelineSpec& spec) {
  if (source.scores.empty()) damaged(source, "scores", "no scores", "the scores that \"llama\" vocabularies have");
  std::vector<uint32_t> order;
  for (uint32_t id = 0; id < source.tokens.size(); ++id) {
    if (std::isnan(source.scores[id])) damaged(source, "scores[" + std::to_string(id) + "]", "not a number", "a score");
    if (type_of(source, id) == kNormal) order.push_back(id);
  }
  std::ranges::stable_sort(order, [&](uint32_t a, uint32_t b) { return source.scores[a] > source.scores[b]; });
  std::vector<uint32_t> ranks(source.tokens.size(), kNoToken);
  for (uint32_t i = 0; i < order.size(); ++i) {
    const bool tie = i > 0 && source.scores[order[i]] == source.scores[order[i - 1]];
    ranks[order[i]] = tie ? ranks[order[i - 1]] : i;
  }
  spec.merges = detail::merges_from_ranks(spec.vocabulary, ranks);
}

void make_sentencepiece(const GgufVocabulary& source, PipelineSpec& spec) {
  rank_by_score(source, spec);
  spec.options.byte_fallback = spec.options.fuse_unk = true;
  if (source.unk) {
    spec.options.unk = static_cast<uint32_t>(*source.unk);
  } else {
    for (size_t id = 0; id < source.tokens.size() && spec.options.unk == kNoToken; ++id)
      if (type_of(source, id) == kUnknown) spec.options.unk = static_cast<uint32_t>(id);
  }
  const bool prefix = source.add_space_prefix.value_or(true);
  json steps = json::array();
  if (prefix) steps.push_back({{"type", "Prepend"}, {"prepend", detail::kMetaspace}});
  steps.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", detail::kMetaspace}});
  spec.normalizer = {{"type", "Sequence"}, {"normalizers", steps}};
  json decoders = {{{"type", "Replace"}, {"pattern", {{"String", detail::kMetaspace}}}, {"content", " "}},
                   {{"type", "ByteFallback"}},
                   {{"type", "Fuse"}}};
  if (prefix) decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  spec.decoder = {{"type", "Sequence"}, {"decoders", decoders}};
}

bool make_byte_level(const GgufVocabulary& source, const std::vector<GgufPre>* own, PipelineSpec& spec) {
  const GgufPre pre = detail::gguf_pre(source.pre.empty() ? "default" : source.pre, source.source, own);
  read_merges(source, spec);
  spec.pre_tokenizer = pre.pre_tokenizer;
  if (pre.nfc) spec.normalizer = {{"type", "NFC"}};
  spec.options.ignore_merges = pre.ignore_merges;
  spec.decoder = detail::byte_level_decoder();
  return pre.add_bos;
}

}  // namespace

bool ends_a_turn(std::string_view text) {
  constexpr std::array<std::string_view, 6> kEnds = {"<|eot_id|>", "<|eom_id|>",    "<|im_end|>",
                                                     "<|end|>",    "<end_of_turn>", "<EOT>"};
  return std::ranges::find(kEnds, text) != kEnds.end();
}

std::unique_ptr<Tokenizer> tokenizer_from_gguf(const GgufVocabulary& source, const std::vector<GgufPre>* own) {
  check_sizes(source);
  check_texts(source);
  PipelineSpec spec;
  spec.file = source.source;
  add_tokens(source, spec);
  bool add_bos = false;
  if (source.model == "llama") {
    make_sentencepiece(source, spec);
    add_bos = true;
  } else if (source.model == "gpt2") {
    add_bos = make_byte_level(source, own, spec);
  } else {
    throw Error(ErrorClass::kUnsupported,
                {source.source + ": key \"tokenizer.ggml.model\"", "got \"" + shorten(source.model) + "\"",
                 "\"gpt2\" or \"llama\"", "use a file with such a vocabulary"});
  }
  SpecialTokens& special = spec.special;
  special.bos = source.bos;
  special.eos = source.eos;
  special.unk = source.unk;
  special.pad = source.pad;
  if (source.eos) special.eos_ids.push_back(*source.eos);
  const auto ends = [&](int64_t id) {
    if (std::ranges::find(special.eos_ids, id) == special.eos_ids.end()) special.eos_ids.push_back(id);
  };
  if (source.eot) ends(*source.eot);
  // The file names two at most; llama.cpp knows the others by their text.
  for (size_t id = 0; id < source.tokens.size(); ++id)
    if (type_of(source, id) == kControl && ends_a_turn(source.tokens[id])) ends(static_cast<int64_t>(id));
  special.chat_template = repair_utf8(source.chat_template);
  special.chat_template_place = source.source + ": tokenizer.chat_template";
  const auto around = [&](bool wanted, const std::optional<int64_t>& id) {
    std::vector<std::pair<std::string, int64_t>> pieces;
    if (wanted && id) pieces.emplace_back(source.tokens[static_cast<size_t>(*id)], *id);
    return pieces;
  };
  const auto prefix = around(source.add_bos.value_or(add_bos), source.bos),
             suffix = around(source.add_eos.value_or(false), source.eos);
  if (!prefix.empty() || !suffix.empty()) spec.post_processor = detail::template_processor(prefix, suffix);
  return detail::make_pipeline(std::move(spec));
}

namespace detail {
namespace {

json sequence(std::vector<json> steps) {
  return {{"type", "Sequence"}, {"pretokenizers", std::move(steps)}};
}

json digits(bool individual) {
  return {{"type", "Digits"}, {"individual_digits", individual}};
}

// Letters with their case, for vocabularies that split words at changes of case.
constexpr const char* kUpper = R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])";
constexpr const char* kLower = R"([\p{Ll}\p{Lm}\p{Lo}\p{M}])";

std::string cased_pattern(const std::string& contraction, const std::string& numbers) {
  const std::string lead = R"([^\r\n\p{L}\p{N}]?)", upper = kUpper, lower = kLower;
  return lead + upper + "*" + lower + "+" + contraction + "|" + lead + upper + "+" + lower + "*" + contraction + "|" +
         numbers + R"(| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
}

// By name; several names may stand for the same.
const std::map<std::string, GgufPre>& table() {
  static const std::map<std::string, GgufPre> names = [] {
    std::map<std::string, GgufPre> all;
    const auto add = [&](const std::vector<const char*>& same, json pre_tokenizer, bool nfc = false,
                         bool ignore_merges = false, bool add_bos = false) {
      for (const char* name : same) all[name] = {name, pre_tokenizer, nfc, ignore_merges, add_bos};
    };
    const json bytes = byte_level_pre_tokenizer(false, true), single = sequence({digits(true), bytes});
    const json llama3 = split_pre_tokenizer(kLlama3Pattern), qwen2 = split_pre_tokenizer(kQwen2Pattern);
    const json punctuation = {{"type", "Punctuation"}, {"behavior", "Contiguous"}};
    add({"default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais"}, bytes);
    add({"smollm", "starcoder", "refact", "codeshell"}, single);
    add({"command-r"}, single, true);
    add({"falcon"}, sequence({punctuation, bytes, digits(false), split_step("[0-9][0-9][0-9]")}));
    add({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"}, llama3, false, true, true);
    add({"dbrx", "smaug-bpe"}, llama3);
    add({"qwen2", "deepseek-r1-qwen", "megrez"}, qwen2, true);
    add({"stablelm2"}, qwen2);
    add({"tekken"}, split_pre_tokenizer(cased_pattern("", R"(\p{N})")), false, true, true);
    add({"gpt-4o", "llama4"}, split_pre_tokenizer(cased_pattern("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", R"(\p{N}{1,3})")));
    add({"deepseek-v3"},
        sequence(
            {split_step(R"(\p{N}{1,3})"),
             split_step("[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+"),
             split_step(
                 R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"),
             byte_level_pre_tokenizer(false, false)}));
    for (const FamilySpec& family : all_families())
      for (const GgufPre& pre : family.gguf.pre) all[pre.name] = pre;
    return all;
  }();
  return names;
}

}  // namespace

GgufPre gguf_pre(const std::string& name, const std::string& file, const std::vector<GgufPre>* own) {
  for (const GgufPre& pre : own ? *own : std::vector<GgufPre>())
    if (pre.name == name) return pre;
  const auto found = table().find(name);
  if (found != table().end()) return found->second;
  throw Error(ErrorClass::kUnsupported, {file + ": key \"tokenizer.ggml.pre\"", "got \"" + shorten(name) + "\"",
                                         "one of " + join(table(), ", ", key_of),
                                         did_you_mean(name, table(), "use the model's Hugging Face folder", key_of)});
}
}  // namespace detail

}  // namespace emend::models
