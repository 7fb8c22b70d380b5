// A template as tokens: Jinja's lexer with trim_blocks and lstrip_blocks, and without the last line break.
#include <emend/core/text.h>
#include <emend/models/detail/jinja_node.h>
#include <emend/models/tokenizer/detail/unicode.h>

namespace emend::models::detail::jinja {
namespace {

class Lexer {
 public:
  explicit Lexer(std::string_view source)
      : source_(replace_all(replace_all(std::string(source), "\r\n", "\n"), "\r", "\n")) {
    if (source_.ends_with('\n')) source_.pop_back();
  }

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const size_t open = next_open();
      data(open);
      if (open == source_.size()) break;
      const char kind = source_[open + 1];
      skip(open + 2);
      if (at_ < source_.size() && (source_[at_] == '-' || source_[at_] == '+')) skip(at_ + 1);
      if (kind == '#') {
        comment();
      } else {
        inside(kind == '%');
      }
    }
    add(Token::kEnd, "");
    return std::move(tokens_);
  }

 private:
  size_t next_open() const {
    for (size_t at = at_; (at = source_.find('{', at)) != std::string::npos; ++at)
      if (at + 1 < source_.size() && std::string_view("{%#").find(source_[at + 1]) != std::string_view::npos) return at;
    return source_.size();
  }

  // The text up to `open`, with what the sign there and lstrip_blocks take away.
  void data(size_t open) {
    std::string_view text = std::string_view(source_).substr(at_, open - at_);
    const char sign = open + 2 < source_.size() ? source_[open + 2] : ' ';
    if (open < source_.size() && sign == '-') {
      text = strip(text, {}, false, true);
    } else if (open < source_.size() && sign != '+' && source_[open + 1] != '{') {
      const size_t line = text.rfind('\n') + 1;  // 0 if there is none
      if ((line > 0 || line_starts_) && strip(text.substr(line), {}, true, true).empty()) text = text.substr(0, line);
    }
    if (!text.empty()) add(Token::kData, std::string(text));
    skip(open);
  }

  void comment() {
    const size_t end = source_.find("#}", at_);
    if (end == std::string::npos) throw SyntaxFault{line_, "a comment that does not end"};
    const char sign = end > at_ ? source_[end - 1] : ' ';
    skip(end);
    close(sign, true);
  }

  // Passes the two characters that end a tag, and what follows according to the sign before them.
  void close(char sign, bool trims) {
    const size_t begin = at_;
    size_t end = at_ + 2;
    if (sign == '-') {
      end = source_.size() - strip(std::string_view(source_).substr(end), {}, true, false).size();
    } else if (trims && sign != '+' && end < source_.size() && source_[end] == '\n') {
      ++end;
    }
    skip(end);
    line_starts_ = source_[std::max(begin, end - 1)] == '\n';
  }

  // Expressions and keywords up to the end of the tag, which is no end inside of brackets.
  void inside(bool block) {
    add(block ? Token::kBlockBegin : Token::kPrintBegin, "");
    const int line = line_;
    std::string brackets;
    while (at_ < source_.size()) {
      const char c = source_[at_];
      const bool sign = c == '-' || (block && c == '+');
      if (brackets.empty() && source_.compare(at_ + (sign ? 1 : 0), 2, block ? "%}" : "}}") == 0) {
        add(block ? Token::kBlockEnd : Token::kPrintEnd, "");
        if (sign) skip(at_ + 1);
        return close(sign ? c : ' ', block);
      }
      token(brackets);
    }
    throw SyntaxFault{line, "a tag that does not end"};
  }

  static bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || (c & 0x80); }
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }

  void token(std::string& brackets) {
    const char c = source_[at_];
    if (is_space(std::string_view(source_).substr(at_, utf8_length(c)))) return skip(at_ + utf8_length(c));
    if (c == '"' || c == '\'') return text(c);
    if (is_digit(c)) return number();
    size_t end = at_;
    while (end < source_.size() && is_name(source_[end])) ++end;
    if (end > at_) {
      add(Token::kName, source_.substr(at_, end - at_));
      return skip(end);
    }
    for (const std::string_view op : {"**", "//", "==", "!=", ">=", "<=", ">", "<", "=", "+", "-", "*", "/",
                                      "%",  "~",  "[",  "]",  "(",  ")",  "{", "}", ".", ":", "|", ","}) {
      if (source_.compare(at_, op.size(), op) != 0) continue;
      bracket(op[0], brackets);
      add(Token::kOperator, std::string(op));
      return skip(at_ + op.size());
    }
    throw SyntaxFault{line_, "\"" + source_.substr(at_, utf8_length(c)) + "\""};
  }

  void bracket(char c, std::string& open) const {
    static constexpr std::string_view kOpen = "([{", kClose = ")]}";
    if (kOpen.find(c) != kOpen.npos) open += c;
    if (const size_t which = kClose.find(c); which != kClose.npos) {
      if (open.empty() || open.back() != kOpen[which])
        throw SyntaxFault{line_, std::string("\"") + c + "\" that closes nothing"};
      open.pop_back();
    }
  }

  void number() {
    size_t end = at_;
    // Passes digits from `begin` on, if one stands there.
    const auto digits = [&](size_t begin) {
      if (begin < source_.size() && is_digit(source_[begin]))
        end = std::min(source_.find_first_not_of("0123456789_", begin), source_.size());
    };
    const auto is_one_of = [&](size_t at, std::string_view all) {
      return at < source_.size() && all.find(source_[at]) != all.npos;
    };
    digits(at_);
    const size_t whole = end;
    if (is_one_of(end, ".")) digits(end + 1);
    if (is_one_of(end, "eE")) digits(end + (is_one_of(end + 1, "+-") ? 2 : 1));
    add(end > whole ? Token::kReal : Token::kWhole, replace_all(source_.substr(at_, end - at_), "_", ""));
    skip(end);
  }

  void text(char quote) {
    const int line = line_;
    std::string content;
    size_t at = at_ + 1;
    while (at < source_.size() && source_[at] != quote) {
      if (source_[at] == '\\' && at + 1 < source_.size()) {
        at = escape(at + 1, content);
      } else {
        content += source_[at++];
      }
    }
    if (at >= source_.size()) throw SyntaxFault{line, "a text that does not end"};
    add(Token::kText, content);
    skip(at + 1);
  }

  // Python's escapes; returns the place behind. An unknown one stands for itself.
  size_t escape(size_t at, std::string& content) const {
    static constexpr std::string_view kFrom = "\\'\"abfnrtv", kTo = "\\'\"\a\b\f\n\r\t\v";
    const char c = source_[at];
    if (c == '\n') return at + 1;
    if (const size_t which = kFrom.find(c); which != kFrom.npos) {
      content += kTo[which];
      return at + 1;
    }
    const bool octal = c >= '0' && c <= '7';
    const size_t digits = octal ? 3 : c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    size_t begin = octal ? at : at + 1, end = begin;
    const std::string_view allowed = octal ? "01234567" : "0123456789abcdefABCDEF";
    while (end < source_.size() && end - begin < digits && allowed.find(source_[end]) != allowed.npos) ++end;
    if (digits == 0) {
      content += '\\';
      content += c;
      return at + 1;
    }
    const auto code = number_in<uint32_t>(std::string_view(source_).substr(begin, end - begin), octal ? 8 : 16);
    if ((!octal && end - begin < digits) || !code || *code > 0x10FFFF || (*code >= 0xD800 && *code < 0xE000))
      throw SyntaxFault{line_, std::string("the escape \\") + c + " without a character"};
    append_utf8(content, *code);
    return end;
  }

  void add(Token::Type type, std::string text) { tokens_.push_back({type, std::move(text), line_}); }
  void skip(size_t to) {
    to = std::min(to, source_.size());
    for (; at_ < to; ++at_) line_ += source_[at_] == '\n';
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starts_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view source) {
  return Lexer(source).run();
}

}  // namespace emend::models::detail::jinja
