#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <utf8proc.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emend {
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

std::optional<size_t> first_invalid_utf8(std::string_view text) noexcept {
  size_t position = 0;
  while ((position = skip_ascii(text, position)) < text.size()) {
    size_t broken = 0;
    const size_t length = check_character(text.substr(position), broken);
    if (length == 0) return position;
    position += length;
  }
  return std::nullopt;
}

bool is_ascii(std::string_view text) noexcept {
  return skip_ascii(text, 0) == text.size();
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

namespace {

bool steers(uint32_t code) {
  return code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x061C || code == 0x200E || code == 0x200F ||
         (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);
}

}  // namespace

Utf8Character character_at(std::string_view text, size_t at) noexcept {
  utf8proc_int32_t code = 0;
  const auto length = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + at,
                                       static_cast<utf8proc_ssize_t>(text.size() - at), &code);
  if (length <= 0) return {};
  return {static_cast<char32_t>(code), static_cast<size_t>(length)};
}

std::string printable(std::string_view text, bool lines) {
  std::string out;
  out.reserve(text.size());
  for (size_t position = 0; position < text.size();) {
    const auto [code, size] = character_at(text, position);
    if (code && (code == '\t' || (code == '\n' && lines) || !steers(*code))) {
      out += text.substr(position, size);
    } else {
      char escape[8];
      const auto byte = static_cast<unsigned char>(text[position]);
      std::snprintf(escape, sizeof escape, code ? "\\u%04x" : "\\x%02x", static_cast<unsigned>(code.value_or(byte)));
      out += escape;
    }
    position += size;
  }
  return out;
}

// `text`, which must be UTF-8, as utf8proc maps it; as it is where it cannot be.
static std::string mapped_form(std::string_view text, int options) {
  utf8proc_uint8_t* made = nullptr;
  const auto length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &made, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPAT | options));
  if (length < 0) return std::string(text);
  std::string out(reinterpret_cast<const char*>(made), static_cast<size_t>(length));
  std::free(made);
  return out;
}

std::string folded(std::string_view text) {
  if (first_invalid_utf8(text)) return std::string(text);
  std::string out = mapped_form(text, UTF8PROC_COMPOSE | UTF8PROC_CASEFOLD);
  for (const std::string_view quote : {"\u2018", "\u2019"}) out = replace_all(std::move(out), quote, "'");
  return out;
}

std::string compatibility_form(std::string_view text) {
  return mapped_form(repair_utf8(text), UTF8PROC_DECOMPOSE);
}

bool says_nothing(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const auto [code, size] = character_at(text, at);
    if (!code) return false;
    const auto kind = utf8proc_category(static_cast<utf8proc_int32_t>(*code));
    if (kind < UTF8PROC_CATEGORY_ZS || kind > UTF8PROC_CATEGORY_CF) return false;
    at += size;
  }
  return true;
}

char32_t point_at(std::string_view text, size_t at) noexcept {
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return character_at(text, at).code.value_or(0);
}

bool spaceless(std::string_view text, size_t at) noexcept {
  const char32_t point = point_at(text, at);
  const auto in = [&](char32_t first, char32_t last) { return point >= first && point <= last; };
  return in(0x0E00, 0x0EFF) || in(0x1000, 0x109F) || in(0x1780, 0x17FF) || in(0x2E80, 0x9FFF) || in(0xF900, 0xFAFF) ||
         in(0x20000, 0x3FFFF);
}

bool in_spaced_word(std::string_view text, size_t at) noexcept {
  const auto kind = utf8proc_category(static_cast<utf8proc_int32_t>(point_at(text, at)));
  return kind >= UTF8PROC_CATEGORY_LU && kind <= UTF8PROC_CATEGORY_NO && !spaceless(text, at);
}

size_t incomplete_tail(std::string_view bytes) noexcept {
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

int64_t line_of_offset(std::string_view text, size_t offset) noexcept {
  return 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(std::min(offset, text.size())), '\n');
}

}  // namespace emend
