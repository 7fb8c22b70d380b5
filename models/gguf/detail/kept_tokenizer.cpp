#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/staged.h>
#include <emend/core/utf8.h>
#include <emend/models/detail/model_folder.h>
#include <emend/models/gguf/detail/kept_tokenizer.h>

#include <algorithm>

namespace emend::models::detail {
namespace {

namespace fs = std::filesystem;
using Files = std::vector<std::pair<std::string, std::string>>;  // name, content

constexpr const char* kHex = "hex:";
constexpr const char* kDigits = "0123456789abcdef";

std::string to_hex(const std::string& bytes) {
  std::string text;
  text.reserve(2 * bytes.size());
  for (const unsigned char c : bytes) {
    text += kDigits[c >> 4];
    text += kDigits[c & 15];
  }
  return text;
}

std::optional<std::string> from_hex(const std::string& text) {
  if (text.size() % 2 != 0) return std::nullopt;
  std::string bytes;
  bytes.reserve(text.size() / 2);
  const auto digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; };
  for (size_t i = 0; i < text.size(); i += 2) {
    const int high = digit(text[i]), low = digit(text[i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    bytes += static_cast<char>(high * 16 + low);
  }
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

// The tokenizer of the files, which it saves again.
class KeptTokenizer final : public Tokenizer {
 public:
  KeptTokenizer(std::unique_ptr<Tokenizer> inner, Files files) : inner_(std::move(inner)), files_(std::move(files)) {
    special_.bos = inner_->bos_id();
    special_.eos = inner_->eos_id();
    special_.unk = inner_->unk_id();
    special_.pad = inner_->pad_id();
    special_.eos_ids = inner_->eos_ids();
    special_.prefix_ids = inner_->prefix_ids();
    special_.chat_template = inner_->chat_template();
    fingerprint_ = inner_->fingerprint();
  }
  [[nodiscard]] Encoding encode(std::string_view text, bool add_special) const override {
    return inner_->encode(text, add_special);
  }
  [[nodiscard]] std::vector<int64_t> encode_ids(std::string_view text, bool add_special) const override {
    return inner_->encode_ids(text, add_special);
  }
  [[nodiscard]] std::string decode(std::span<const int64_t> ids, bool skip_special) const override {
    return inner_->decode(ids, skip_special);
  }
  [[nodiscard]] std::string token_text(int64_t id) const override { return inner_->token_text(id); }
  [[nodiscard]] std::string token_bytes(int64_t id, bool at_start) const override {
    return inner_->token_bytes(id, at_start);
  }
  [[nodiscard]] std::optional<int64_t> token_id(std::string_view piece) const override {
    return inner_->token_id(piece);
  }
  [[nodiscard]] bool is_special(int64_t id) const override { return inner_->is_special(id); }
  [[nodiscard]] int64_t vocab_size() const override { return inner_->vocab_size(); }
  void save(const fs::path& folder) const override {
    for (const auto& [name, content] : files_) write_file(folder / name, content);
  }

 private:
  std::unique_ptr<Tokenizer> inner_;
  Files files_;
};

}  // namespace

std::vector<std::string> keep_tokenizer(const Tokenizer& tokenizer) {
  const TemporaryFolder folder("tokenizer");  // tokenizers are read from and written to folders
  save_tokenizer(tokenizer, folder.path());
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder.path())) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> list;
  for (const auto& path : paths) {
    const std::string content = read_file(path), name = path.filename().string();
    const bool text = !first_invalid_utf8(content);
    list.push_back(text ? name : kHex + name);
    list.push_back(text ? content : to_hex(content));
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
    return std::make_unique<KeptTokenizer>(load_tokenizer(folder.path()), std::move(files));
  } catch (const Error& error) {
    std::string what = error.what();  // it names the momentary folder
    const std::string place = folder.path().string();
    for (size_t at; (at = what.find(place)) != std::string::npos;) {
      const bool within = what.compare(at + place.size(), 1, "/") == 0;
      what.replace(at, place.size() + (within ? 1 : 0), within ? "" : "the kept files");
    }
    file.fail_key(kTokenizerKey, what, "the tokenizer files that emend wrote there");
  }
}

}  // namespace emend::models::detail
