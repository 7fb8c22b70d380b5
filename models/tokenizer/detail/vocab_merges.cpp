// vocab.json + merges.txt: GPT-2, OPT, GPT-J, Qwen2 and others that share their format.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/checks.h>
#include <emend/models/tokenizer/detail/json_view.h>
#include <emend/models/tokenizer/detail/post_processor.h>
#include <emend/models/tokenizer/detail/sources.h>

namespace emend::models::detail {

using nlohmann::json;

const char* const kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
const char* const kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

json byte_level_pre_tokenizer(bool add_prefix_space, bool use_regex) {
  return {
      {"type", "ByteLevel"}, {"add_prefix_space", add_prefix_space}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

json split_pre_tokenizer(const std::string& pattern) {
  const json split = {
      {"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", {split, byte_level_pre_tokenizer(false, false)}}};
}

json byte_level_decoder() {
  return {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};
}

namespace {

void read_vocabulary(const std::filesystem::path& path, PipelineSpec& spec) {
  const json document = parse_json(read_file(path), path.string());
  const JsonView view(document, path.string());
  if (!document.is_object()) view.fail("an object of pieces and ids");
  spec.vocabulary.reserve(document.size());
  for (const auto& [piece, ignored] : document.items())
    spec.vocabulary.add(piece, static_cast<uint32_t>(view.at(piece).integer(0, kMaxTokenId)));
}

void read_merges(const std::filesystem::path& path, PipelineSpec& spec) {
  const std::string text = read_file(path);
  size_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string_view line = std::string_view(text).substr(at, end - at);
    at = end + 1;
    ++number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.empty() || line.substr(0, 8) == "#version") continue;
    const size_t space = line.find(' ');
    const std::string_view left = line.substr(0, space), right = space == line.npos ? "" : line.substr(space + 1);
    const Merge merge{spec.vocabulary.find(left), spec.vocabulary.find(right),
                      spec.vocabulary.find(std::string(left).append(right)), static_cast<uint32_t>(spec.merges.size())};
    if (merge.left == kNoToken || merge.right == kNoToken || merge.result == kNoToken)
      throw Error(ErrorClass::kCorruption,
                  {path.string() + ":" + std::to_string(number), "got \"" + excerpt(line) + "\"",
                   "two pieces of vocab.json that make a third", "get both files again"});
    spec.merges.push_back(merge);
  }
}

}  // namespace

PipelineSpec read_vocab_and_merges(const std::filesystem::path& folder, const FolderConfig& config) {
  PipelineSpec spec;
  spec.file = (folder / "vocab.json").string();
  read_vocabulary(folder / "vocab.json", spec);
  read_merges(folder / "merges.txt", spec);
  const bool qwen = config.tokenizer_class().rfind("Qwen2", 0) == 0;
  if (qwen) {
    spec.normalizer = {{"type", "NFC"}};
    spec.pre_tokenizer = split_pre_tokenizer(kQwen2Pattern);
  } else {
    spec.pre_tokenizer = byte_level_pre_tokenizer(config.flag("add_prefix_space").value_or(false), true);
  }
  spec.decoder = byte_level_decoder();
  config.apply(spec);
  const auto bos = config.special_text("bos_token");
  if (config.flag("add_bos_token").value_or(false) && bos && spec.special.bos)
    spec.post_processor = template_processor({{*bos, *spec.special.bos}}, {});
  return spec;
}

}  // namespace emend::models::detail
