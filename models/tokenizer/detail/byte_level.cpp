#include <emend/models/tokenizer/detail/byte_level.h>
#include <emend/models/tokenizer/detail/unicode.h>

namespace emend::models::detail {
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
