#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/checks.h>
#include <emend/models/tokenizer/detail/unicode.h>

#include <limits>
#include <string>

namespace emend::models::detail {

void check_text(std::string_view text) {
  if (text.size() > std::numeric_limits<uint32_t>::max())
    throw Error(ErrorClass::kInvalidArgument, {"tokenizer", "a text of " + std::to_string(text.size()) + " bytes",
                                               "less than 4 GiB", "split the text"});
  const size_t at = find_invalid_utf8(text);
  if (at == kNone) return;
  constexpr const char* kDigits = "0123456789ABCDEF";
  const auto byte = static_cast<unsigned char>(text[at]);
  throw Error(ErrorClass::kInvalidArgument, {"tokenizer",
                                             std::string("the text is not valid UTF-8 at byte ") + std::to_string(at) +
                                                 " (0x" + kDigits[byte >> 4] + kDigits[byte & 15] + ")",
                                             "UTF-8 text", "convert the text to UTF-8 first"});
}

void check_id(int64_t id) {
  if (id < 0)
    throw Error(ErrorClass::kInvalidArgument,
                {"tokenizer", "token id " + std::to_string(id), "an id of 0 or more", "check where the ids come from"});
}

std::string excerpt(std::string_view text) {
  constexpr size_t kMost = 80;
  if (text.size() <= kMost) return std::string(text);
  size_t end = kMost;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return std::string(text.substr(0, end)) + "…";
}

}  // namespace emend::models::detail
