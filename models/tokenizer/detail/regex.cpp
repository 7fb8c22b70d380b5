#define PCRE2_CODE_UNIT_WIDTH 8
#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/regex.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <pcre2.h>

#include <cstring>

namespace emend::models::detail {

Regex::Regex(const std::string& pattern, const std::string& where)
    : pattern_(emend::Regex(translate_pattern(pattern, where), where, /*lines=*/true)) {}

Regex Regex::literal(std::string text) {
  EMEND_CHECK(!text.empty(), "an empty literal matches everywhere");
  Regex regex;
  regex.literal_ = std::move(text);
  return regex;
}

bool Regex::match(std::string_view text, size_t start, size_t& begin, size_t& end) const {
  if (pattern_) return pattern_->match(text, start, begin, end);
  begin = text.find(literal_, start);
  end = begin + literal_.size();
  return begin != std::string_view::npos;
}

Regex::Scan::Scan(const Regex& regex, std::string_view text) : regex_(regex), text_(text) {
  if (regex.pattern_ && !is_ascii(text) && with_known_characters(text, known_)) text_ = known_;
}

bool Regex::Scan::next(size_t& begin, size_t& end) {
  while (position_ <= text_.size()) {
    if (!regex_.match(text_, position_, begin, end)) break;
    if (end > begin || end != last_end_) {
      position_ = last_end_ = end;
      return true;
    }
    if (end >= text_.size()) break;
    position_ = end + utf8_length(text_[end]);
  }
  position_ = text_.size() + 1;
  return false;
}

namespace {

// \w of Oniguruma as the inside of a class: also marks, letter numbers and enclosed letters.
constexpr std::string_view kWordClass =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}\\x{24B6}-\\x{24E9}\\x{1F130}-\\x{1F149}"
    "\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}";
constexpr std::string_view kHexClass = "0-9a-fA-F";

bool is_script(const std::string& name) {
  const std::string probe = "\\p{sc:" + name + "}";
  int error = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(probe.data()), probe.size(), PCRE2_UTF, &error, &at, nullptr);
  pcre2_code_free(code);
  return code != nullptr;
}

class Translator {
 public:
  Translator(std::string_view pattern, const std::string& where) : pattern_(pattern), where_(where) {}

  std::string run() {
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      const size_t begin = out_.size();
      if (c == '{' && bounded_repeat()) continue;
      if (c == '\\') {
        escape(false);
        atom_ = begin;
      } else if (c == '[') {
        character_class();
        atom_ = begin;
      } else if (c == '(' && pattern_.substr(at_, 2) == "(?") {
        groups_.push_back(begin);
        group();
      } else {
        if (c == '(') groups_.push_back(begin);
        if (c == ')' && !groups_.empty()) {
          atom_ = groups_.back();
          groups_.pop_back();
        }
        const bool begins = (static_cast<unsigned char>(c) & 0xC0) != 0x80;  // a character of its own
        if (begins && !std::strchr("()*+?{}|", c)) atom_ = begin;
        out_ += c;
        ++at_;
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorClass::kUnsupported, {where_, "the pattern \"" + shorten(pattern_) + "\" uses " + what,
                                           "a pattern without it", "report the model, so that support can be added"});
  }

  // One escape; inside a class, sets are spliced in without brackets.
  void escape(bool in_class) {
    const char kind = at_ + 1 < pattern_.size() ? pattern_[at_ + 1] : '\0';
    const auto set = [&](std::string_view members, bool negated) {
      if (in_class && negated) refuse("a negated set inside a class");
      out_ += in_class ? std::string(members) : (negated ? "[^" : "[") + std::string(members) + "]";
      at_ += 2;
    };
    if (kind == 'w' || kind == 'W') return set(kWordClass, kind == 'W');
    if (kind == 'h' || kind == 'H') return set(kHexClass, kind == 'H');
    if (kind == 'u' && at_ + 6 <= pattern_.size()) {
      out_ += "\\x{" + std::string(pattern_.substr(at_ + 2, 4)) + "}";
      at_ += 6;
      return;
    }
    if ((kind == 'p' || kind == 'P') && at_ + 2 < pattern_.size() && pattern_[at_ + 2] == '{') {
      const size_t close = pattern_.find('}', at_);
      if (close != std::string_view::npos) {
        std::string name(pattern_.substr(at_ + 3, close - at_ - 3));
        const std::string sign = !name.empty() && name[0] == '^' ? "^" : "";
        name.erase(0, sign.size());
        // Up to two letters: categories. Oniguruma's script names mean the script property, not its extensions.
        const bool script = name.size() > 2 && is_script(name);
        out_ += std::string("\\") + kind + "{" + sign + (script ? "sc:" : "") + name + "}";
        at_ = close + 1;
        return;
      }
    }
    size_t length = 2;
    if ((kind == 'x' || kind == 'o') && pattern_.substr(at_ + 2, 1) == "{")  // the braces are its own
      if (const size_t close = pattern_.find('}', at_); close != std::string_view::npos) length = close + 1 - at_;
    out_ += pattern_.substr(at_, length);
    at_ += length;
  }

  // "X{1,3}+" repeats X{1,3} in Ruby syntax; for PCRE2 it is possessive.
  bool bounded_repeat() {
    const size_t close = pattern_.find('}', at_);
    if (close == std::string_view::npos || pattern_.substr(close + 1, 1) != "+") return false;
    const auto bounds = pattern_.substr(at_, close + 1 - at_);
    if (bounds.find_first_not_of("0123456789,", 1) != bounds.size() - 1 || bounds.size() < 3) return false;
    if (atom_ == std::string::npos) return false;
    out_.insert(atom_, "(?:");
    out_ += std::string(bounds) + ")+";
    at_ = close + 2;
    atom_ = std::string::npos;
    return true;
  }

  // "[…]", nested positive classes flattened into their union.
  void character_class() {
    out_ += '[';
    ++at_;
    if (at_ < pattern_.size() && pattern_[at_] == '^') {
      out_ += '^';
      ++at_;
    }
    members();
    out_ += ']';
  }

  void members() {
    bool first = true;
    for (; at_ < pattern_.size(); first = false) {
      const char c = pattern_[at_];
      if (c == ']' && !first) {
        ++at_;
        return;
      }
      if (c == '\\') {
        escape(true);
      } else if (c == '[' && pattern_.substr(at_, 2) == "[:") {
        const size_t close = pattern_.find(":]", at_);
        const size_t end = close == std::string_view::npos ? pattern_.size() : close + 2;
        out_ += pattern_.substr(at_, end - at_);
        at_ = end;
      } else if (c == '[') {
        if (pattern_.substr(at_, 2) == "[^") refuse("a negated class inside a class");
        if (++depth_ > 20) refuse("classes nested more than 20 deep");
        ++at_;
        members();
        --depth_;
      } else if (pattern_.substr(at_, 2) == "&&") {
        refuse("the intersection of classes (&&)");
      } else {
        if (c == ']') out_ += '\\';
        out_ += c;
        ++at_;
      }
    }
    throw Error(ErrorClass::kCorruption, {where_, "the pattern \"" + shorten(pattern_) + "\" has a class without end",
                                          "]", "get the tokenizer file again, or correct the pattern"});
  }

  // "(?m" lets the dot match newlines in Ruby syntax, which PCRE2 calls "(?s".
  void group() {
    out_ += "(?";
    at_ += 2;
    size_t end = at_;
    while (end < pattern_.size() && std::string_view("imx-").find(pattern_[end]) != std::string_view::npos) ++end;
    if (end == pattern_.size() || (pattern_[end] != ':' && pattern_[end] != ')')) return;
    for (; at_ < end; ++at_) out_ += pattern_[at_] == 'm' ? 's' : pattern_[at_];
  }

  std::string_view pattern_;
  const std::string& where_;
  std::string out_;
  size_t at_ = 0;
  size_t atom_ = std::string::npos;  // where the last one begins in out_
  std::vector<size_t> groups_;       // where the open ones begin there
  int depth_ = 0;
};

}  // namespace

std::string translate_pattern(std::string_view pattern, const std::string& where) {
  return Translator(pattern, where).run();
}

}  // namespace emend::models::detail
