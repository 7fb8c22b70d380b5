#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/regex.h>
#include <emend/models/tokenizer/detail/unicode.h>

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

}  // namespace emend::models::detail
