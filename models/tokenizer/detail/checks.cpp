#include <emend/core/error.h>
#include <emend/core/utf8.h>
#include <emend/models/tokenizer/detail/checks.h>

#include <limits>
#include <string>

namespace emend::models::detail {

void check_text(std::string_view text) {
  if (text.size() > std::numeric_limits<uint32_t>::max())
    throw Error(ErrorClass::kInvalidArgument, {"tokenizer", "a text of " + std::to_string(text.size()) + " bytes",
                                               "less than 4 GiB", "split the text"});
  const auto at = first_invalid_utf8(text);
  if (!at) return;
  constexpr const char* kDigits = "0123456789ABCDEF";
  const auto byte = static_cast<unsigned char>(text[*at]);
  throw Error(ErrorClass::kInvalidArgument, {"tokenizer",
                                             std::string("the text is not valid UTF-8 at byte ") + std::to_string(*at) +
                                                 " (0x" + kDigits[byte >> 4] + kDigits[byte & 15] + ")",
                                             "UTF-8 text", "convert the text to UTF-8 first"});
}

void check_id(int64_t id) {
  if (id < 0)
    throw Error(ErrorClass::kInvalidArgument,
                {"tokenizer", "token id " + std::to_string(id), "an id of 0 or more", "check where the ids come from"});
}

}  // namespace emend::models::detail
