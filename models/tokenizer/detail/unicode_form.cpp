#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <emend/models/tokenizer/detail/unicode_form.h>
#include <utf8proc.h>

#include <cstdlib>
#include <string>

namespace emend::models::detail {
namespace {

// True if the character never combines with what stands before it. Marks do; so do the vowels and finals of Hangul.
bool starts_group(char32_t c) {
  if (c < 0x300) return true;
  if ((c >= 0x1160 && c <= 0x11FF) || (c >= 0xD7B0 && c <= 0xD7FF)) return false;
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  if (category >= UTF8PROC_CATEGORY_MN && category <= UTF8PROC_CATEGORY_ME) return false;
  // Halfwidth Hangul and kana marks become combining characters under compatibility decomposition.
  return !(c >= 0xFF9E && c <= 0xFFDC);
}

class UnicodeForm final : public Normalizer {
 public:
  UnicodeForm(bool compose, bool compatibility, ComposeTables tables) : tables_(tables) {
    int options = UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE);
    if (compatibility) options |= UTF8PROC_COMPAT;
    options_ = static_cast<utf8proc_option_t>(options);
  }

  bool apply(const Piece& source, PieceBuilder& result) const override {
    const std::string_view text = source.text;
    if (is_ascii(text) || (!has_recent_mark(text) && map(text) == text)) return false;
    result.reserve(text.size() + text.size() / 4);
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = group_end(text, begin);
      const std::string_view group = text.substr(begin, end - begin);
      const std::string mapped = is_recent(group) ? std::string(group) : map(group);
      if (mapped == group) {
        result.keep(source, begin, end);
      } else {
        result.put(mapped, source, begin, end);
      }
      begin = end;
    }
    return true;
  }

 private:
  bool is_recent(std::string_view group) const {
    return tables_ == ComposeTables::kReference && group.size() > 1 && is_recent_mark(decode_utf8(group.data()));
  }

  bool has_recent_mark(std::string_view text) const {
    for (size_t at = 0; at < text.size(); at += utf8_length(text[at]))
      if (is_recent(text.substr(at))) return true;
    return false;
  }

  // A character that starts a group and the ones that may combine with it. A recent mark is a group of its own.
  size_t group_end(std::string_view text, size_t begin) const {
    size_t end = begin + utf8_length(text[begin]);
    if (is_recent(text.substr(begin))) return end;
    while (end < text.size() && !starts_group(decode_utf8(text.data() + end)) && !is_recent(text.substr(end)))
      end += utf8_length(text[end]);
    return end;
  }

  std::string map(std::string_view text) const {
    if (text.size() == 1) return std::string(text);  // ASCII
    utf8proc_uint8_t* mapped = nullptr;
    const auto length = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                     static_cast<utf8proc_ssize_t>(text.size()), &mapped, options_);
    EMEND_CHECK(length >= 0, std::string("utf8proc: ") + utf8proc_errmsg(length));
    std::string result(reinterpret_cast<const char*>(mapped), static_cast<size_t>(length));
    std::free(mapped);
    return result;
  }

  ComposeTables tables_;
  utf8proc_option_t options_;
};

}  // namespace

std::unique_ptr<Normalizer> make_unicode_form(bool compose, bool compatibility, ComposeTables tables) {
  return std::make_unique<UnicodeForm>(compose, compatibility, tables);
}

}  // namespace emend::models::detail
