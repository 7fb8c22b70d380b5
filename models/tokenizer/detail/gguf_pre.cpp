#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/models/family.h>
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
    add({"falcon"}, sequence({punctuation, bytes, digits(false), split("[0-9][0-9][0-9]")}));
    add({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"}, llama3, false, true, true);
    add({"dbrx", "smaug-bpe"}, llama3);
    add({"qwen2", "deepseek-r1-qwen", "megrez"}, qwen2, true);
    add({"stablelm2"}, qwen2);
    add({"tekken"}, split_pre_tokenizer(cased_pattern("", R"(\p{N})")), false, true, true);
    add({"gpt-4o", "llama4"}, split_pre_tokenizer(cased_pattern("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", R"(\p{N}{1,3})")));
    add({"deepseek-v3"},
        sequence(
            {split(R"(\p{N}{1,3})"),
             split("[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+"),
             split(
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

}  // namespace emend::models::detail
