#include <emend/models/tokenizer/detail/unicode.h>
#include <utf8proc.h>

namespace emend::models::detail {

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

size_t last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while ((static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

size_t white_space_before(std::string_view text, size_t end) {
  while (end > 0) {
    const size_t at = last_character(text.substr(0, end));
    if (!is_white_space(decode_utf8(text.data() + at))) break;
    end = at;
  }
  return end;
}

size_t white_space_after(std::string_view text, size_t begin) {
  while (begin < text.size() && is_white_space(decode_utf8(text.data() + begin))) begin += utf8_length(text[begin]);
  return begin;
}

namespace {

bool is_printable(int byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

struct Tables {
  std::array<std::string, 256> characters;
  std::array<int, 324> bytes;  // the 68 unprintable bytes take the characters from U+0100 on

  Tables() {
    bytes.fill(-1);
    char32_t next = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const char32_t character = is_printable(byte) ? static_cast<char32_t>(byte) : next++;
      append_utf8(characters[byte], character);
      bytes[character] = byte;
    }
  }
};

const Tables& tables() {
  static const Tables instance;
  return instance;
}

}  // namespace

const std::array<std::string, 256>& byte_level_characters() {
  return tables().characters;
}

int byte_of_character(char32_t character) {
  return character < tables().bytes.size() ? tables().bytes[character] : -1;
}

std::string to_byte_level(std::string_view bytes) {
  const auto& characters = byte_level_characters();
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const char byte : bytes) text += characters[static_cast<unsigned char>(byte)];
  return text;
}

void to_byte_level(const Piece& source, PieceBuilder& result) {
  const auto& characters = byte_level_characters();
  result.reserve(source.text.size() * 2);
  for (size_t i = 0; i < source.text.size(); ++i)
    result.put(characters[static_cast<unsigned char>(source.text[i])], source, i, i + 1);
}

std::string from_byte_level(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t position = 0; position < text.size(); position += utf8_length(text[position])) {
    const int byte = byte_of_character(decode_utf8(text.data() + position));
    if (byte < 0) return std::string(text);
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

}  // namespace emend::models::detail
