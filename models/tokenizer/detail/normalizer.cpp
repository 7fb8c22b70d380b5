#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/steps.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <utf8proc.h>

#include <cstdlib>

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

class UnicodeForm {
 public:
  UnicodeForm(bool compose, bool compatibility, ComposeTables tables) : tables_(tables) {
    int options = UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE);
    if (compatibility) options |= UTF8PROC_COMPAT;
    options_ = static_cast<utf8proc_option_t>(options);
  }

  bool operator()(const Piece& source, PieceBuilder& result) const {
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

Normalizer strip(bool left, bool right) {
  return [left, right](const Piece& source, PieceBuilder& result) {
    const std::string_view text = source.text;
    const size_t begin = left ? white_space_after(text, 0) : 0;
    const size_t end = right ? std::max(begin, white_space_before(text, text.size())) : text.size();
    if (begin == 0 && end == text.size()) return false;
    result.keep(source, begin, end);
    return true;
  };
}

bool lowercase(const Piece& source, PieceBuilder& result) {
  const std::string_view text = source.text;
  result.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_length(text[at]);
    const char32_t character = decode_utf8(text.data() + at);
    std::string lower;
    append_utf8(lower, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(character))));
    if (character == 0x130) lower = "i\xCC\x87";  // İ, the only character with a two-character lower case
    result.put(lower, source, at, at + length);
    at += length;
  }
  return true;
}

}  // namespace

void refuse_growth(const char* what, size_t most) {
  throw Error(
      ErrorClass::kUnsupported,
      {std::string("tokenizer: ") + what, "rules that make more than " + std::to_string(most) + " bytes of a text",
       "rules that keep a text at most 64 times as long", "look at the \"Replace\" steps of tokenizer.json"});
}

void PieceBuilder::too_long() const {
  refuse_growth("normalizer", most_);
}

Normalizer make_prepend(const std::string& text) {
  return [text](const Piece& source, PieceBuilder& result) {
    if (source.text.empty() || text.empty()) return false;
    result.reserve(source.text.size() + text.size());
    result.put(text, source, 0, 0);
    result.keep(source, 0, source.text.size());
    return true;
  };
}

Normalizer make_replace(std::shared_ptr<const Regex> pattern, const std::string& content) {
  return [pattern, content](const Piece& source, PieceBuilder& result) {
    Regex::Scan scan(*pattern, source.text);
    size_t begin = 0, end = 0, done = 0;
    bool changed = false;
    while (scan.next(begin, end)) {
      if (!changed) result.reserve(source.text.size() + source.text.size() / 2);
      changed = true;
      result.keep(source, done, begin);
      result.put(content, source, begin, end);
      done = end;
    }
    if (changed) result.keep(source, done, source.text.size());
    return changed;
  };
}

bool byte_level(const Piece& source, PieceBuilder& result) {
  to_byte_level(source, result);
  return true;
}

Normalizer make_unicode_form(bool compose, bool compatibility, ComposeTables tables) {
  return UnicodeForm(compose, compatibility, tables);
}

NormalizerChain make_normalizers(const JsonView& normalizer, ComposeTables tables) {
  NormalizerChain chain;
  for_each_step(normalizer, "normalizers", [&](const JsonView& view, const std::string& type) {
    if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
      chain.push_back(make_unicode_form(type == "NFC" || type == "NFKC", type.size() == 4, tables));
    } else if (type == "Prepend") {
      chain.push_back(make_prepend(view.at("prepend").string()));
    } else if (type == "Replace") {
      auto pattern = make_pattern(view.at("pattern"));
      if (pattern) chain.push_back(make_replace(std::move(pattern), view.at("content").string()));
    } else if (type == "Strip") {
      chain.push_back(strip(view.boolean_or("strip_left", true), view.boolean_or("strip_right", true)));
    } else if (type == "Lowercase") {
      chain.emplace_back(lowercase);
    } else if (type == "ByteLevel") {
      chain.emplace_back(byte_level);
    } else {
      view.unsupported("the normalizer \"" + shorten(type) + "\"",
                       "NFC, NFD, NFKC, NFKD, Prepend, Replace, Strip, Lowercase, ByteLevel or Sequence");
    }
  });
  return chain;
}

void normalise(const NormalizerChain& chain, const Piece& source, PieceSink sink) {
  Piece piece = source;
  std::optional<PieceBuilder> held;
  for (const auto& step : chain) {
    PieceBuilder builder(longest_text(source.text.size()));
    if (!step(piece, builder)) continue;
    held = std::move(builder);
    piece = held->piece();
  }
  sink(piece);
}

std::string normalise(const NormalizerChain& chain, std::string_view text) {
  std::string result;
  normalise(chain, {text}, [&result](const Piece& piece) { result = piece.text; });
  return result;
}

}  // namespace emend::models::detail
