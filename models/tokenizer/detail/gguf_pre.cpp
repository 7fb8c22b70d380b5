#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/checks.h>
#include <emend/models/tokenizer/detail/gguf_pre.h>
#include <emend/models/tokenizer/detail/sources.h>

#include <map>
#include <vector>

namespace emend::models::detail {
namespace {

using nlohmann::json;

json sequence(std::vector<json> steps) {
  return {{"type", "Sequence"}, {"pretokenizers", std::move(steps)}};
}

json split(const std::string& pattern) {
  return {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
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

GgufPre gpt2() {
  return {byte_level_pre_tokenizer(false, true)};
}
GgufPre single_digits() {
  return {sequence({digits(true), byte_level_pre_tokenizer(false, true)})};
}
GgufPre llama3() {
  return {split_pre_tokenizer(kLlama3Pattern), false, true, true};
}
GgufPre llama3_with_merges() {
  return {split_pre_tokenizer(kLlama3Pattern)};
}
GgufPre qwen2() {
  return {split_pre_tokenizer(kQwen2Pattern), true};
}
GgufPre qwen2_without_nfc() {
  return {split_pre_tokenizer(kQwen2Pattern)};
}
GgufPre command_r() {
  return {sequence({digits(true), byte_level_pre_tokenizer(false, true)}), true};
}

GgufPre falcon() {
  const json punctuation = {{"type", "Punctuation"}, {"behavior", "Contiguous"}};
  return {sequence({punctuation, byte_level_pre_tokenizer(false, true), digits(false), split("[0-9][0-9][0-9]")})};
}

GgufPre tekken() {
  return {split_pre_tokenizer(cased_pattern("", R"(\p{N})")), false, true, true};
}
GgufPre gpt4o() {
  return {split_pre_tokenizer(cased_pattern("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", R"(\p{N}{1,3})"))};
}

GgufPre deepseek3() {
  return {sequence(
      {split(R"(\p{N}{1,3})"), split("[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+"),
       split(
           R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"),
       byte_level_pre_tokenizer(false, false)})};
}

const std::map<std::string, GgufPre (*)()>& table() {
  static const std::map<std::string, GgufPre (*)()> names = {
      {"default", gpt2},
      {"gpt-2", gpt2},
      {"gpt2", gpt2},
      {"phi-2", gpt2},
      {"mpt", gpt2},
      {"olmo", gpt2},
      {"jais", gpt2},
      {"smollm", single_digits},
      {"starcoder", single_digits},
      {"refact", single_digits},
      {"codeshell", single_digits},
      {"command-r", command_r},
      {"falcon", falcon},
      {"llama-bpe", llama3},
      {"llama3", llama3},
      {"llama-v3", llama3},
      {"falcon3", llama3},
      {"pixtral", llama3},
      {"dbrx", llama3_with_merges},
      {"smaug-bpe", llama3_with_merges},
      {"glm4", llama3_with_merges},
      {"chatglm-bpe", llama3_with_merges},
      {"qwen2", qwen2},
      {"deepseek-r1-qwen", qwen2},
      {"megrez", qwen2},
      {"stablelm2", qwen2_without_nfc},
      {"tekken", tekken},
      {"gpt-4o", gpt4o},
      {"llama4", gpt4o},
      {"deepseek-v3", deepseek3},
  };
  return names;
}

}  // namespace

GgufPre gguf_pre(const std::string& name, const std::string& file) {
  const auto found = table().find(name);
  if (found != table().end()) return found->second();
  std::vector<std::string> known;
  std::string list;
  for (const auto& [key, ignored] : table()) {
    known.push_back(key);
    list += (list.empty() ? "" : ", ") + key;
  }
  const std::string close = closest_name(name, known);
  throw Error(ErrorClass::kUnsupported,
              {file + ": key \"tokenizer.ggml.pre\"", "got \"" + excerpt(name) + "\"", "one of " + list,
               close.empty() ? "use the model's Hugging Face folder" : "did you mean \"" + close + "\"?"});
}

}  // namespace emend::models::detail
