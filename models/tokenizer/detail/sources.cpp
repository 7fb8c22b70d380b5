// Tokenizers as folders have them: tokenizer.json, a SentencePiece model, vocab.json + merges.txt (GPT-2, OPT, GPT-J,
// Qwen2 and others that share their format), and tiktoken vocabularies, which are lines of "base64 rank": a token's
// rank is its id and the rank of the merge that makes it.
#include <emend/core/atomic_file.h>
#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/sources.h>
#include <emend/models/tokenizer/detail/steps.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <openssl/evp.h>

#include <fstream>
#include <numeric>
#include <system_error>

namespace emend::models {
namespace detail {

using nlohmann::json;

const char* const kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
const char* const kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

json byte_level_pre_tokenizer(bool add_prefix_space, bool use_regex) {
  return {
      {"type", "ByteLevel"}, {"add_prefix_space", add_prefix_space}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

json split_step(const std::string& pattern) {
  return {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
}

json split_pre_tokenizer(const std::string& pattern) {
  return {{"type", "Sequence"}, {"pretokenizers", {split_step(pattern), byte_level_pre_tokenizer(false, false)}}};
}

namespace {

// Calls visit(line, its number) for every line, without the end of the line.
template <class Visit>
void for_each_line(std::string_view text, const Visit& visit) {
  size_t number = 0;
  for (size_t at = 0, end = 0; at < text.size(); at = end + 1) {
    end = std::min(text.find('\n', at), text.size());
    visit(text.substr(at, end - at), ++number);
  }
}

void read_merges(const std::filesystem::path& path, PipelineSpec& spec) {
  for_each_line(read_file(path), [&](std::string_view line, size_t number) {
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || line.starts_with("#version")) return;
    const size_t space = line.find(' ');
    if (!spec.add_merge(line.substr(0, space), space == line.npos ? "" : line.substr(space + 1)))
      throw Error(ErrorClass::kCorruption,
                  {path.string() + ":" + std::to_string(number), "got \"" + shorten(line) + "\"",
                   "two pieces of vocab.json that make a third", "get both files again"});
  });
}

// GPT-2 or, by the class in tokenizer_config.json, Qwen2.
PipelineSpec read_vocab_and_merges(const std::filesystem::path& folder, const FolderConfig& config) {
  PipelineSpec spec;
  spec.file = (folder / "vocab.json").string();
  read_pieces({read_json(spec.file, {.repeated_keys = true}), spec.file}, spec.vocabulary);
  read_merges(folder / "merges.txt", spec);
  const bool qwen = config.tokenizer_class().rfind("Qwen2", 0) == 0;
  if (qwen) {
    spec.normalizer = {{"type", "NFC"}};
    spec.pre_tokenizer = split_pre_tokenizer(kQwen2Pattern);
  } else {
    spec.pre_tokenizer = byte_level_pre_tokenizer(config.flag("add_prefix_space").value_or(false), true);
  }
  spec.decoder = byte_level_decoder();
  config.apply(spec, /*no_post_processor=*/true);
  return spec;
}

std::optional<std::string> decode_base64(std::string_view text) {
  const size_t padding = text.size() - std::min(text.find('='), text.size());
  std::string bytes(text.size() / 4 * 3, '\0');
  const int size = EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                                   reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
  if (text.empty() || text.size() % 4 != 0 || padding > 2 || size != static_cast<int>(bytes.size())) return {};
  bytes.resize(bytes.size() - padding);
  return bytes;
}

// The bytes of a token and its rank.
std::optional<std::pair<std::string, uint32_t>> parse_line(std::string_view text) {
  if (text.ends_with('\r')) text.remove_suffix(1);
  const size_t space = text.find(' ');
  if (space == std::string_view::npos) return std::nullopt;
  auto bytes = decode_base64(text.substr(0, space));
  const auto rank = number_in<uint32_t>(text.substr(space + 1));
  if (!bytes || !rank || *rank > kMaxTokenId) return std::nullopt;
  return std::pair(*std::move(bytes), *rank);
}

void read_ranks(const std::filesystem::path& path, Vocabulary& vocabulary) {
  const std::string text = read_file(path);
  vocabulary.reserve(text.size() / 12);
  for_each_line(text, [&](std::string_view line, size_t number) {
    if (line.empty()) return;
    const auto parsed = parse_line(line);
    if (!parsed)
      throw Error(ErrorClass::kCorruption,
                  {path.string() + ":" + std::to_string(number), "got \"" + shorten(line) + "\"",
                   "a token in base64, a space and its rank", "get the file again"});
    vocabulary.add(to_byte_level(parsed->first), parsed->second);
  });
}

// Qwen (version 1) numbers its special tokens from the end of the ranks: three named ones and 205 spare ones.
void add_qwen_tokens(PipelineSpec& spec, const FolderConfig& config) {
  const int64_t start = config.id("special_tokens_start").value_or(spec.vocabulary.id_end());
  if (start != spec.vocabulary.id_end())
    throw Error(
        ErrorClass::kCorruption,
        {spec.file, "the ranks end at " + std::to_string(spec.vocabulary.id_end()),
         "special_tokens_start of tokenizer_config.json, which is " + std::to_string(start), "get both files again"});
  for (const char* name : {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}) spec.add_token({.content = name});
  for (int i = 0; i < 205; ++i) spec.add_token({.content = "<|extra_" + std::to_string(i) + "|>"});
}

// GLM-4 starts every text with [gMASK] <sop>.
void add_glm_prefix(PipelineSpec& spec) {
  const uint32_t mask = spec.find("[gMASK]"), start = spec.find("<sop>");
  if (mask == kNoToken || start == kNoToken) return;
  spec.post_processor = template_processor({{"[gMASK]", mask}, {"<sop>", start}}, {});
}

// True if the file starts as a tiktoken vocabulary does.
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

}  // namespace

std::optional<PipelineSpec> read_pipeline(const std::filesystem::path& folder, const FolderConfig& config) {
  const auto has = [&folder](const char* name) { return std::filesystem::is_regular_file(folder / name); };
  const auto with_files = [&](PipelineSpec spec, const std::vector<std::string>& files) {
    spec.files = config.files(files);
    return spec;
  };
  if (has("tokenizer.json")) {
    PipelineSpec spec = read_tokenizer_json(folder / "tokenizer.json");
    config.apply(spec);
    return with_files(std::move(spec), {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"});
  }
  if (has("tokenizer.model")) {
    if (!looks_like_tiktoken(folder / "tokenizer.model")) return std::nullopt;
    return with_files(read_tiktoken(folder / "tokenizer.model", config), {"tokenizer.model"});
  }
  if (has("vocab.json") && has("merges.txt"))
    return with_files(read_vocab_and_merges(folder, config), {"vocab.json", "merges.txt"});
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".tiktoken")
      return with_files(read_tiktoken(entry.path(), config), {entry.path().filename().string()});
  throw Error(ErrorClass::kNotFound,
              {folder.string(), "no tokenizer in this folder",
               "tokenizer.json, tokenizer.model, vocab.json with merges.txt, or a .tiktoken file",
               "copy the tokenizer files of the model into the folder"});
}

}  // namespace detail

std::unique_ptr<Tokenizer> load_tokenizer(const std::filesystem::path& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    throw Error(ErrorClass::kNotFound,
                {folder.string(), "no such folder", "a folder with a tokenizer", "check the path"});
  const detail::FolderConfig config(folder);
  if (auto spec = detail::read_pipeline(folder, config)) return detail::make_pipeline(*std::move(spec));
  return detail::load_sentencepiece(folder / "tokenizer.model", config);
}

}  // namespace emend::models
