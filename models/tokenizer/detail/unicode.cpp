#include <emend/models/tokenizer/detail/unicode.h>
#include <utf8proc.h>

#include <algorithm>
#include <iterator>

namespace emend::models::detail {

void append_utf8(std::string& text, char32_t character) {
  std::array<utf8proc_uint8_t, 4> bytes{};
  const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(character), bytes.data());
  text.append(bytes.begin(), bytes.begin() + length);
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
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));  // letters, marks and numbers follow
  return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NL) || category == UTF8PROC_CATEGORY_PC;
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
    const char32_t character = decode_utf8(text.data() + position);
    const int byte = character < tables().bytes.size() ? tables().bytes[character] : -1;
    if (byte < 0) return std::string(text);
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

// The characters on which the reference tokenizers and our libraries disagree.
//
// Found by asking Hugging Face tokenizers 0.23.3 (Oniguruma with Unicode 16, Rust's tables, unicode_categories 0.1 with
// Unicode 8, unicode-normalization-alignments 0.1 with Unicode 9) and PCRE2 10.42 (Unicode 14) and utf8proc 2.8
// (Unicode 15) about every code point. With newer libraries the entries become harmless, not wrong.

namespace {

struct Range {
  char32_t first, last;
};
struct Replacement {
  char32_t first, last;
  char32_t known;  ///< a long-known character of the same category and the same length in UTF-8
};

template <class Table>
auto find_range(const Table& table, char32_t character) -> decltype(std::begin(table)) {
  const auto after = std::upper_bound(std::begin(table), std::end(table), character,
                                      [](char32_t c, const auto& range) { return c < range.first; });
  if (after == std::begin(table)) return std::end(table);
  const auto found = std::prev(after);
  return character <= found->last ? found : std::end(table);
}

template <class Table>
bool contains(const Table& table, char32_t character) {
  return find_range(table, character) != std::end(table);
}

// Assigned after Unicode 14, and U+180E, which is no white space any more.
constexpr Replacement kUnknownToPcre2[] = {
    {0x897, 0x897, 0x1AB0},      {0xCF3, 0xCF3, 0x1AB0},      {0xECE, 0xECE, 0x1AB0},      {0x180E, 0x180E, 0x200B},
    {0x1B4E, 0x1B4F, 0x1B5A},    {0x1B7F, 0x1B7F, 0x1B5A},    {0x1C89, 0x1C89, 0xA7C0},    {0x1C8A, 0x1C8A, 0xA7C1},
    {0x2427, 0x2429, 0x2423},    {0x2FFC, 0x2FFF, 0x2423},    {0x31E4, 0x31E5, 0x2423},    {0x31EF, 0x31EF, 0x2423},
    {0xA7CB, 0xA7CC, 0xA7C0},    {0xA7CD, 0xA7CD, 0xA7C1},    {0xA7DA, 0xA7DA, 0xA7C0},    {0xA7DB, 0xA7DB, 0xA7C1},
    {0xA7DC, 0xA7DC, 0xA7C0},    {0x105C0, 0x105F3, 0x10280}, {0x10D40, 0x10D49, 0x11066}, {0x10D4A, 0x10D4D, 0x10280},
    {0x10D4E, 0x10D4E, 0x16B40}, {0x10D4F, 0x10D4F, 0x10280}, {0x10D50, 0x10D65, 0x10400}, {0x10D69, 0x10D6D, 0x11001},
    {0x10D6E, 0x10D6E, 0x10100}, {0x10D6F, 0x10D6F, 0x16B40}, {0x10D70, 0x10D85, 0x10428}, {0x10D8E, 0x10D8F, 0x1F300},
    {0x10EC2, 0x10EC4, 0x10280}, {0x10EFC, 0x10EFF, 0x11001}, {0x1123F, 0x11240, 0x10280}, {0x11241, 0x11241, 0x11001},
    {0x11380, 0x11389, 0x10280}, {0x1138B, 0x1138B, 0x10280}, {0x1138E, 0x1138E, 0x10280}, {0x11390, 0x113B5, 0x10280},
    {0x113B7, 0x113B7, 0x10280}, {0x113B8, 0x113C0, 0x11001}, {0x113C2, 0x113C2, 0x11001}, {0x113C5, 0x113C5, 0x11001},
    {0x113C7, 0x113CA, 0x11001}, {0x113CC, 0x113D0, 0x11001}, {0x113D1, 0x113D1, 0x10280}, {0x113D2, 0x113D2, 0x11001},
    {0x113D3, 0x113D3, 0x10280}, {0x113D4, 0x113D5, 0x10100}, {0x113D7, 0x113D8, 0x10100}, {0x113E1, 0x113E2, 0x11001},
    {0x116D0, 0x116E3, 0x11066}, {0x11B00, 0x11B09, 0x10100}, {0x11BC0, 0x11BE0, 0x10280}, {0x11BE1, 0x11BE1, 0x10100},
    {0x11BF0, 0x11BF9, 0x11066}, {0x11F00, 0x11F01, 0x11001}, {0x11F02, 0x11F02, 0x10280}, {0x11F03, 0x11F03, 0x11001},
    {0x11F04, 0x11F10, 0x10280}, {0x11F12, 0x11F33, 0x10280}, {0x11F34, 0x11F3A, 0x11001}, {0x11F3E, 0x11F42, 0x11001},
    {0x11F43, 0x11F4F, 0x10100}, {0x11F50, 0x11F59, 0x11066}, {0x11F5A, 0x11F5A, 0x11001}, {0x1342F, 0x1342F, 0x10280},
    {0x13440, 0x13440, 0x11001}, {0x13441, 0x13446, 0x10280}, {0x13447, 0x13455, 0x11001}, {0x13460, 0x143FA, 0x10280},
    {0x16100, 0x1611D, 0x10280}, {0x1611E, 0x1612F, 0x11001}, {0x16130, 0x16139, 0x11066}, {0x16D40, 0x16D42, 0x16B40},
    {0x16D43, 0x16D6A, 0x10280}, {0x16D6B, 0x16D6C, 0x16B40}, {0x16D6D, 0x16D6F, 0x10100}, {0x16D70, 0x16D79, 0x11066},
    {0x18CFF, 0x18CFF, 0x10280}, {0x1B132, 0x1B132, 0x10280}, {0x1B155, 0x1B155, 0x10280}, {0x1CC00, 0x1CCEF, 0x1F300},
    {0x1CCF0, 0x1CCF9, 0x11066}, {0x1CD00, 0x1CEB3, 0x1F300}, {0x1D2C0, 0x1D2D3, 0x11052}, {0x1DF25, 0x1DF2A, 0x10428},
    {0x1E030, 0x1E06D, 0x16B40}, {0x1E08F, 0x1E08F, 0x11001}, {0x1E4D0, 0x1E4EA, 0x10280}, {0x1E4EB, 0x1E4EB, 0x16B40},
    {0x1E4EC, 0x1E4EF, 0x11001}, {0x1E4F0, 0x1E4F9, 0x11066}, {0x1E5D0, 0x1E5ED, 0x10280}, {0x1E5EE, 0x1E5EF, 0x11001},
    {0x1E5F0, 0x1E5F0, 0x10280}, {0x1E5F1, 0x1E5FA, 0x11066}, {0x1E5FF, 0x1E5FF, 0x10100}, {0x1F6DC, 0x1F6DC, 0x1F300},
    {0x1F774, 0x1F776, 0x1F300}, {0x1F77B, 0x1F77F, 0x1F300}, {0x1F7D9, 0x1F7D9, 0x1F300}, {0x1F8B2, 0x1F8BB, 0x1F300},
    {0x1F8C0, 0x1F8C1, 0x1F300}, {0x1FA75, 0x1FA77, 0x1F300}, {0x1FA87, 0x1FA89, 0x1F300}, {0x1FA8F, 0x1FA8F, 0x1F300},
    {0x1FAAD, 0x1FAAF, 0x1F300}, {0x1FABB, 0x1FABF, 0x1F300}, {0x1FAC6, 0x1FAC6, 0x1F300}, {0x1FACE, 0x1FACF, 0x1F300},
    {0x1FADA, 0x1FADC, 0x1F300}, {0x1FADF, 0x1FADF, 0x1F300}, {0x1FAE8, 0x1FAE9, 0x1F300}, {0x1FAF7, 0x1FAF8, 0x1F300},
    {0x1FBCB, 0x1FBEF, 0x1F300}, {0x2B739, 0x2B739, 0x20000}, {0x2EBF0, 0x2EE5D, 0x20000}, {0x31350, 0x323AF, 0x20000},
};

// Marks that the reference's composition does not move or compose: assigned after Unicode 9, and one late composite.
constexpr Range kRecentMarks[] = {
    {0x7FD, 0x7FD},     {0x898, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},     {0xC3C, 0xC3C},
    {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},   {0x1ABF, 0x1ACE},   {0x1DF6, 0x1DFA},
    {0xA82C, 0xA82C},   {0x10D24, 0x10D27}, {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50},
    {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A},
    {0x11930, 0x11930}, {0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34},
    {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97},
    {0x11F41, 0x11F42}, {0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE},
    {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF},
};

// Punctuation that the reference's table does not have.
constexpr Range kRecentPunctuation[] = {
    {0x61D, 0x61D},     {0x9FD, 0x9FD},     {0xA76, 0xA76},     {0xC77, 0xC77},     {0xC84, 0xC84},
    {0x1B7D, 0x1B7E},   {0x2E43, 0x2E4F},   {0x2E52, 0x2E5D},   {0x10EAD, 0x10EAD}, {0x10F55, 0x10F59},
    {0x10F86, 0x10F89}, {0x1144B, 0x1144F}, {0x1145A, 0x1145B}, {0x1145D, 0x1145D}, {0x11660, 0x1166C},
    {0x116B9, 0x116B9}, {0x1183B, 0x1183B}, {0x11944, 0x11946}, {0x119E2, 0x119E2}, {0x11A3F, 0x11A46},
    {0x11A9A, 0x11A9C}, {0x11A9E, 0x11AA2}, {0x11B00, 0x11B09}, {0x11C41, 0x11C45}, {0x11C70, 0x11C71},
    {0x11EF7, 0x11EF8}, {0x11F43, 0x11F4F}, {0x11FFF, 0x11FFF}, {0x12FF1, 0x12FF2}, {0x16E97, 0x16E9A},
    {0x16FE2, 0x16FE2}, {0x1E95E, 0x1E95F},
};

// Numbers assigned after utf8proc's Unicode version.
constexpr Range kRecentNumbers[] = {
    {0x10D40, 0x10D49}, {0x116D0, 0x116E3}, {0x11BF0, 0x11BF9}, {0x11DE0, 0x11DE9}, {0x16130, 0x16139},
    {0x16D70, 0x16D79}, {0x16FF4, 0x16FF6}, {0x1CCF0, 0x1CCF9}, {0x1E5F1, 0x1E5FA},
};

}  // namespace

bool is_recent_mark(char32_t character) {
  return contains(kRecentMarks, character);
}

bool is_numeric(char32_t character) {
  if (character < 0x80) return character >= '0' && character <= '9';
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(character));
  return (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO) || contains(kRecentNumbers, character);
}

bool is_punctuation(char32_t character) {
  if (character < 0x80) {
    return (character >= '!' && character <= '/') || (character >= ':' && character <= '@') ||
           (character >= '[' && character <= '`') || (character >= '{' && character <= '~');
  }
  if (character == 0x166D || character == 0x111C9) return true;  // were punctuation in Unicode 8
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(character));
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO &&
         !contains(kRecentPunctuation, character);
}

bool with_known_characters(std::string_view text, std::string& copy) {
  bool found = false;
  for (size_t position = 0; position < text.size();) {
    const auto lead = static_cast<unsigned char>(text[position]);
    if (lead < 0xE0) {  // the table starts above U+0800
      position += lead < 0x80 ? 1 : 2;
      continue;
    }
    const auto entry = find_range(kUnknownToPcre2, decode_utf8(text.data() + position));
    const size_t length = utf8_length(text[position]);
    if (entry != std::end(kUnknownToPcre2)) {
      if (!found) copy.assign(text);
      found = true;
      std::string known;
      append_utf8(known, entry->known);
      copy.replace(position, length, known);
    }
    position += length;
  }
  return found;
}

}  // namespace emend::models::detail
