#include <emend/models/tokenizer/detail/unicode.h>
#include <utf8proc.h>

#include <cstring>

namespace emend::models::detail {
namespace {

// Length of the valid character at the start of `bytes`, or 0. On 0, `broken` is the length of the maximal part
// that could still have begun a character (at least 1).
size_t check_character(std::string_view bytes, size_t& broken) {
  const auto at = [bytes](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  broken = 1;
  const unsigned lead = at(0);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  unsigned low = 0x80, high = 0xBF;  // bounds of the second byte exclude overlong forms and surrogates
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  for (size_t i = 1; i < length; ++i) {
    if (i >= bytes.size() || at(i) < low || at(i) > high) return 0;
    low = 0x80;
    high = 0xBF;
    broken = i + 1;
  }
  return length;
}

size_t skip_ascii(std::string_view text, size_t position) {
  constexpr uint64_t kHighBits = 0x8080808080808080ULL;
  while (position + 8 <= text.size()) {
    uint64_t word;
    std::memcpy(&word, text.data() + position, 8);
    if (word & kHighBits) break;
    position += 8;
  }
  while (position < text.size() && static_cast<unsigned char>(text[position]) < 0x80) ++position;
  return position;
}

}  // namespace

size_t find_invalid_utf8(std::string_view text) {
  size_t position = 0;
  while ((position = skip_ascii(text, position)) < text.size()) {
    size_t broken = 0;
    const size_t length = check_character(text.substr(position), broken);
    if (length == 0) return position;
    position += length;
  }
  return kNone;
}

bool is_ascii(std::string_view text) {
  return skip_ascii(text, 0) == text.size();
}

void append_utf8(std::string& text, char32_t character) {
  const auto put = [&text](char32_t byte) { text += static_cast<char>(byte); };
  if (character < 0x80) {
    put(character);
  } else if (character < 0x800) {
    put(0xC0 | character >> 6), put(0x80 | (character & 0x3F));
  } else if (character < 0x10000) {
    put(0xE0 | character >> 12), put(0x80 | (character >> 6 & 0x3F)), put(0x80 | (character & 0x3F));
  } else {
    put(0xF0 | character >> 18), put(0x80 | (character >> 12 & 0x3F));
    put(0x80 | (character >> 6 & 0x3F)), put(0x80 | (character & 0x3F));
  }
}

std::string repair_utf8(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (size_t position = 0; position < bytes.size();) {
    size_t broken = 0;
    const size_t length = check_character(bytes.substr(position), broken);
    if (length > 0) {
      text.append(bytes, position, length);
    } else {
      text += "\xEF\xBF\xBD";
    }
    position += length > 0 ? length : broken;
  }
  return text;
}

size_t incomplete_tail(std::string_view bytes) {
  for (size_t tail = 1; tail <= 3 && tail <= bytes.size(); ++tail) {
    const auto lead = static_cast<unsigned char>(bytes[bytes.size() - tail]);
    if (lead < 0x80) return 0;
    if (lead < 0xC0) continue;
    size_t broken = 0;
    const bool whole = check_character(bytes.substr(bytes.size() - tail), broken) > 0;
    return !whole && broken == tail && lead >= 0xC2 && lead <= 0xF4 ? tail : 0;
  }
  return 0;
}

bool is_white_space(char32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_word(char32_t c) {
  if (c == 0x200C || c == 0x200D) return true;
  if ((c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
      (c >= 0x1F170 && c <= 0x1F189))
    return true;  // enclosed letters: symbols, but alphabetic
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

}  // namespace emend::models::detail
