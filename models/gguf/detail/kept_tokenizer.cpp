#include <emend/core/atomic_file.h>
#include <emend/core/staged.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/models/detail/hf_checkpoint.h>
#include <emend/models/gguf/detail/hf_vocabulary.h>

#include <algorithm>

namespace emend::models::detail {
namespace {

namespace fs = std::filesystem;
using Files = std::vector<std::pair<std::string, std::string>>;  // name, content

constexpr const char* kHex = "hex:";

std::optional<std::string> from_hex(const std::string& text) {
  if (text.size() % 2 != 0) return std::nullopt;
  std::string bytes;
  bytes.reserve(text.size() / 2);
  if (text.find_first_not_of("0123456789abcdef") != std::string::npos) return std::nullopt;
  for (size_t i = 0; i < text.size(); i += 2) bytes += static_cast<char>(*number_in<int>(text.substr(i, 2), 16));
  return bytes;
}

Files files_of(const GgufFile& file) {
  const std::vector<std::string> list = file.texts(kTokenizerKey);
  if (list.size() % 2 != 0) file.fail_key(kTokenizerKey, "an odd number of texts", "names and contents in turn");
  Files files;
  for (size_t i = 0; i < list.size(); i += 2) {
    const bool hex = list[i].starts_with(kHex);
    const std::string name = hex ? list[i].substr(4) : list[i];
    if (!(is_tokenizer_file(name) || name == "generation_config.json") || name.find('/') != std::string::npos)
      file.fail_key(kTokenizerKey, "a file \"" + name.substr(0, 80) + "\"", "names of tokenizer files");
    const auto content = hex ? from_hex(list[i + 1]) : std::optional(list[i + 1]);
    if (!content) file.fail_key(kTokenizerKey, name + " is not hexadecimal", "two digits a byte");
    files.emplace_back(name, *content);
  }
  return files;
}

}  // namespace

std::vector<std::string> keep_tokenizer(const Tokenizer& tokenizer) {
  const TemporaryFolder folder("tokenizer");  // tokenizers are read from and written to folders
  save_tokenizer(tokenizer, folder.path());
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder.path())) paths.push_back(entry.path());
  std::ranges::sort(paths);
  std::vector<std::string> list;
  for (const auto& path : paths) {
    const std::string content = read_file(path), name = path.filename().string();
    const bool text = !first_invalid_utf8(content);
    list.push_back(text ? name : kHex + name);
    list.push_back(text ? content : emend::hex(content));
  }
  return list;
}

std::unique_ptr<Tokenizer> kept_tokenizer(const GgufFile& file, const nlohmann::json& config) {
  Files files = files_of(file);
  if (files.empty()) return nullptr;
  const TemporaryFolder folder("tokenizer");  // tokenizers are read from and written to folders
  for (const auto& [name, content] : files) write_file(folder.path() / name, content);
  if (config.is_object()) write_file(folder.path() / "config.json", config.dump());
  try {
    auto tokenizer = load_tokenizer(folder.path());
    tokenizer->keep_files(std::move(files), file.path().string() + ": " + kTokenizerKey);
    return tokenizer;
  } catch (const Error& error) {
    const std::string place = folder.path().string();  // momentary
    const std::string what = replace_all(replace_all(error.what(), place + "/", ""), place, "the kept files");
    file.fail_key(kTokenizerKey, what, "the tokenizer files that emend wrote there");
  }
}

}  // namespace emend::models::detail
