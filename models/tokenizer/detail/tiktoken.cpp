// tiktoken vocabularies: lines of "base64 rank". A token's rank is its id and the rank of the merge that makes it.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/byte_level.h>
#include <emend/models/tokenizer/detail/checks.h>
#include <emend/models/tokenizer/detail/post_processor.h>
#include <emend/models/tokenizer/detail/sources.h>

#include <array>
#include <charconv>
#include <fstream>
#include <numeric>
#include <optional>

namespace emend::models::detail {
namespace {

std::optional<std::string> decode_base64(std::string_view text) {
  static constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  std::string bytes;
  for (size_t at = 0; at < text.size(); at += 4) {
    uint32_t group = 0;
    int digits = 0;
    for (; digits < 4 && text[at + digits] != '='; ++digits) {
      const size_t value = kDigits.find(text[at + digits]);
      if (value == std::string_view::npos) return std::nullopt;
      group |= static_cast<uint32_t>(value) << (18 - 6 * digits);
    }
    if (digits < 2 || (digits < 4 && at + 4 != text.size())) return std::nullopt;
    for (int byte = 0; byte < digits - 1; ++byte) bytes += static_cast<char>(group >> (16 - 8 * byte));
  }
  return bytes;
}

struct Line {
  std::string bytes;
  uint32_t rank = 0;
};

std::optional<Line> parse_line(std::string_view text) {
  if (!text.empty() && text.back() == '\r') text.remove_suffix(1);
  const size_t space = text.find(' ');
  if (space == std::string_view::npos) return std::nullopt;
  auto bytes = decode_base64(text.substr(0, space));
  Line line;
  const auto [end, error] = std::from_chars(text.data() + space + 1, text.data() + text.size(), line.rank);
  if (!bytes || error != std::errc() || end != text.data() + text.size() || line.rank > kMaxTokenId)
    return std::nullopt;
  line.bytes = std::move(*bytes);
  return line;
}

void read_ranks(const std::filesystem::path& path, Vocabulary& vocabulary) {
  const std::string text = read_file(path);
  vocabulary.reserve(text.size() / 12);
  size_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = std::string_view(text).substr(at, end - at);
    at = end + 1;
    ++number;
    if (line.empty()) continue;
    const auto parsed = parse_line(line);
    if (!parsed)
      throw Error(ErrorClass::kCorruption,
                  {path.string() + ":" + std::to_string(number), "got \"" + excerpt(line) + "\"",
                   "a token in base64, a space and its rank", "get the file again"});
    vocabulary.add(to_byte_level(parsed->bytes), parsed->rank);
  }
}

void add_special(PipelineSpec& spec, const std::string& content) {
  AddedToken token;
  token.content = content;
  spec.add_token(std::move(token));
}

// Qwen (version 1) numbers its special tokens from the end of the ranks: three named ones and 205 spare ones.
void add_qwen_tokens(PipelineSpec& spec, const FolderConfig& config) {
  const int64_t start = config.id("special_tokens_start").value_or(spec.vocabulary.id_end());
  if (start != spec.vocabulary.id_end())
    throw Error(
        ErrorClass::kCorruption,
        {spec.file, "the ranks end at " + std::to_string(spec.vocabulary.id_end()),
         "special_tokens_start of tokenizer_config.json, which is " + std::to_string(start), "get both files again"});
  for (const char* name : {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}) add_special(spec, name);
  for (int i = 0; i < 205; ++i) add_special(spec, "<|extra_" + std::to_string(i) + "|>");
}

// GLM-4 starts every text with [gMASK] <sop>.
void add_glm_prefix(PipelineSpec& spec) {
  const uint32_t mask = spec.find("[gMASK]"), start = spec.find("<sop>");
  if (mask == kNoToken || start == kNoToken) return;
  spec.post_processor = template_processor({{"[gMASK]", mask}, {"<sop>", start}}, {});
}

}  // namespace

bool looks_like_tiktoken(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string line;
  line.resize(200);
  file.read(line.data(), static_cast<std::streamsize>(line.size()));
  line.resize(static_cast<size_t>(file.gcount()));
  return parse_line(std::string_view(line).substr(0, line.find('\n'))).has_value();
}

PipelineSpec read_tiktoken(const std::filesystem::path& path, const FolderConfig& config) {
  const std::string& name = config.tokenizer_class();
  PipelineSpec spec;
  spec.file = path.string();
  read_ranks(path, spec.vocabulary);
  std::vector<uint32_t> ranks(spec.vocabulary.id_end());
  std::iota(ranks.begin(), ranks.end(), 0u);
  spec.merges = merges_from_ranks(spec.vocabulary, ranks);
  spec.options.ignore_merges = true;  // a word that is a token is that token
  spec.compose = ComposeTables::kUnicode;
  spec.decoder = byte_level_decoder();
  const bool glm = name.rfind("ChatGLM", 0) == 0;
  spec.pre_tokenizer = split_pre_tokenizer(glm ? kLlama3Pattern : kQwen2Pattern);
  if (!glm) {
    spec.normalizer = {{"type", "NFC"}};
    add_qwen_tokens(spec, config);
  }
  config.apply(spec);
  if (glm) add_glm_prefix(spec);
  const uint32_t end = spec.find("<|endoftext|>");
  if (!spec.special.eos && end != kNoToken) {
    spec.special.eos = end;
    spec.special.eos_ids.push_back(end);
  }
  return spec;
}

}  // namespace emend::models::detail
