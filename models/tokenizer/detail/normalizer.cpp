#include <emend/models/tokenizer/detail/byte_level.h>
#include <emend/models/tokenizer/detail/checks.h>
#include <emend/models/tokenizer/detail/normalizer.h>
#include <emend/models/tokenizer/detail/pattern.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <emend/models/tokenizer/detail/unicode_form.h>
#include <utf8proc.h>

#include <optional>

namespace emend::models::detail {
namespace {

class Prepend final : public Normalizer {
 public:
  explicit Prepend(std::string text) : text_(std::move(text)) {}
  bool apply(const Piece& source, PieceBuilder& result) const override {
    if (source.text.empty() || text_.empty()) return false;
    result.reserve(source.text.size() + text_.size());
    result.put(text_, source, 0, 0);
    result.keep(source, 0, source.text.size());
    return true;
  }

 private:
  std::string text_;
};

class Replace final : public Normalizer {
 public:
  Replace(Regex pattern, std::string content) : pattern_(std::move(pattern)), content_(std::move(content)) {}
  bool apply(const Piece& source, PieceBuilder& result) const override {
    Regex::Scan scan(pattern_, source.text);
    size_t begin = 0, end = 0, done = 0;
    bool changed = false;
    while (scan.next(begin, end)) {
      if (!changed) result.reserve(source.text.size() + source.text.size() / 2);
      changed = true;
      result.keep(source, done, begin);
      result.put(content_, source, begin, end);
      done = end;
    }
    if (changed) result.keep(source, done, source.text.size());
    return changed;
  }

 private:
  Regex pattern_;
  std::string content_;
};

class Strip final : public Normalizer {
 public:
  Strip(bool left, bool right) : left_(left), right_(right) {}
  bool apply(const Piece& source, PieceBuilder& result) const override {
    const std::string_view text = source.text;
    size_t begin = 0, end = text.size();
    while (left_ && begin < end && is_white_space(decode_utf8(text.data() + begin))) begin += utf8_length(text[begin]);
    while (right_ && end > begin) {
      size_t last = end - 1;
      while ((static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
      if (!is_white_space(decode_utf8(text.data() + last))) break;
      end = last;
    }
    if (begin == 0 && end == text.size()) return false;
    result.keep(source, begin, end);
    return true;
  }

 private:
  bool left_, right_;
};

class Lowercase final : public Normalizer {
 public:
  bool apply(const Piece& source, PieceBuilder& result) const override {
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
};

class ByteLevelNormalizer final : public Normalizer {
 public:
  bool apply(const Piece& source, PieceBuilder& result) const override {
    to_byte_level(source, result);
    return true;
  }
};

constexpr int kMaxDepth = 32;

void collect(const JsonView& view, ComposeTables tables, NormalizerChain& chain, int depth) {
  if (view.is_null()) return;
  const std::string& type = view.at("type").string();
  if (type == "Sequence") {
    if (depth > kMaxDepth) view.fail("sequences nested at most " + std::to_string(kMaxDepth) + " deep");
    for (const JsonView& step : view.at("normalizers").elements()) collect(step, tables, chain, depth + 1);
  } else if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    chain.push_back(make_unicode_form(type == "NFC" || type == "NFKC", type.size() == 4, tables));
  } else if (type == "Prepend") {
    chain.push_back(std::make_unique<Prepend>(view.at("prepend").string()));
  } else if (type == "Replace") {
    auto pattern = make_pattern(view.at("pattern"));
    if (pattern) chain.push_back(std::make_unique<Replace>(std::move(*pattern), view.at("content").string()));
  } else if (type == "Strip") {
    chain.push_back(std::make_unique<Strip>(view.boolean_or("strip_left", true), view.boolean_or("strip_right", true)));
  } else if (type == "Lowercase") {
    chain.push_back(std::make_unique<Lowercase>());
  } else if (type == "ByteLevel") {
    chain.push_back(std::make_unique<ByteLevelNormalizer>());
  } else {
    view.unsupported("the normalizer \"" + excerpt(type) + "\"",
                     "NFC, NFD, NFKC, NFKD, Prepend, Replace, Strip, Lowercase, ByteLevel or Sequence");
  }
}

}  // namespace

NormalizerChain make_normalizers(const JsonView& view, ComposeTables tables) {
  NormalizerChain chain;
  collect(view, tables, chain, 0);
  return chain;
}

void normalise(const NormalizerChain& chain, const Piece& source, PieceSink sink) {
  Piece piece = source;
  std::optional<PieceBuilder> held;
  for (const auto& step : chain) {
    PieceBuilder builder;
    if (!step->apply(piece, builder)) continue;
    held = std::move(builder);
    piece = held->piece();
  }
  sink(piece);
}

std::string normalise(const NormalizerChain& chain, std::string_view text) {
  std::string result;
  auto take = [&result](const Piece& piece) { result = piece.text; };
  normalise(chain, {text}, take);
  return result;
}

}  // namespace emend::models::detail
