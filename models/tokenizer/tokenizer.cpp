#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <system_error>

namespace emend::models {

std::vector<int64_t> Tokenizer::encode_ids(std::string_view text, bool add_special) const {
  return encode(text, add_special).ids;
}

bool Tokenizer::adds_bos() const {
  return special_.bos &&
         std::find(special_.prefix_ids.begin(), special_.prefix_ids.end(), *special_.bos) != special_.prefix_ids.end();
}

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool skip_special)
    : tokenizer_(tokenizer), skip_special_(skip_special) {}

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

void save_tokenizer(const Tokenizer& tokenizer, const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    throw Error(ErrorClass::kIo, {folder.string(), "cannot make the folder (" + error.message() + ")",
                                  "a folder that can be written", "check the path and its permissions"});
  tokenizer.save(folder);
}

}  // namespace emend::models
