#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <limits>
#include <system_error>

namespace emend::models {

namespace detail {

void check_text(std::string_view text) {
  if (text.size() > std::numeric_limits<uint32_t>::max())
    refuse({"tokenizer", "a text of " + std::to_string(text.size()) + " bytes", "less than 4 GiB", "split the text"});
  const auto at = first_invalid_utf8(text);
  if (!at) return;
  const auto byte = static_cast<unsigned char>(text[*at]);
  refuse({"tokenizer", formatted("the text is not valid UTF-8 at byte %zu (0x%02X)", *at, byte), "UTF-8 text",
          "convert the text to UTF-8 first"});
}

void check_id(int64_t id) {
  if (id < 0)
    refuse({"tokenizer", "token id " + std::to_string(id), "an id of 0 or more", "check where the ids come from"});
}

}  // namespace detail

std::pair<int64_t, int64_t> Encoding::overlapping(size_t begin, size_t end) const {
  int64_t first = -1, last = -1;
  for (size_t i = 0; i < size(); ++i) {
    const auto [from, to] = offsets[i];
    if (from == to || to <= begin || from >= end) continue;
    if (first < 0) first = static_cast<int64_t>(i);
    last = static_cast<int64_t>(i) + 1;
  }
  return {first, last};
}

Encoding Tokenizer::encode_prompt(std::string_view text) const {
  Encoding encoding = encode(text, false);
  encoding.ids.insert(encoding.ids.begin(), special_.prefix_ids.begin(), special_.prefix_ids.end());
  encoding.offsets.insert(encoding.offsets.begin(), special_.prefix_ids.size(), {0, 0});
  return encoding;
}

bool Tokenizer::adds_bos() const {
  return special_.bos && std::ranges::count(special_.prefix_ids, *special_.bos) > 0;
}

std::string Tokenizer::decode_more(std::span<const int64_t> ids, bool skip_special) const {
  StreamDecoder decoder(*this, skip_special, /*at_start=*/false);
  std::string text;
  for (const int64_t id : ids) text += decoder.push(id);
  return text + decoder.finish();
}

std::vector<std::string> Tokenizer::decode_each(std::span<const int64_t> ids) const {
  std::vector<std::string> texts;
  bool begun = false;
  for (const int64_t id : ids) {
    texts.push_back(begun ? decode_more(std::vector{id}) : decode(std::vector{id}));
    begun = begun || !is_special(id);
  }
  return texts;
}

std::string StreamDecoder::push(int64_t id) {
  if (skip_special_ && tokenizer_.is_special(id)) return {};
  const std::string bytes = tokenizer_.token_bytes(id, at_start_);
  // A token that is nothing but the stripped space still ends the start of the text.
  at_start_ = at_start_ && tokenizer_.token_text(id).empty();
  pending_ += bytes;
  const size_t tail = incomplete_tail(pending_);
  std::string text = repair_utf8(std::string_view(pending_).substr(0, pending_.size() - tail));
  pending_.erase(0, pending_.size() - tail);
  return text;
}

std::string StreamDecoder::finish() {
  std::string text = repair_utf8(pending_);
  pending_.clear();
  at_start_ = true;
  return text;
}

void Tokenizer::save(const std::filesystem::path& folder) const {
  for (const auto& [name, content] : kept_) write_file(folder / name, content);
  for (const auto& file : kept_.empty() ? files_ : std::vector<std::filesystem::path>()) {
    const auto target = folder / file.filename();
    std::error_code ignored;
    if (!std::filesystem::equivalent(file, target, ignored)) write_file(target, read_file(file));
  }
}

void save_tokenizer(const Tokenizer& tokenizer, const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    throw Error(class_of_errno(error.value()), {folder.string(), "cannot make the folder (" + error.message() + ")",
                                                "a folder that can be written", "check the path and its permissions"});
  tokenizer.save(folder);
}

}  // namespace emend::models
