#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/utf8.h>
#include <emend/datasets/detail/rows.h>

#include <algorithm>

namespace emend::datasets::detail {

namespace {

constexpr const char* kExpectedForm = "a JSON array of objects, or one JSON object a line";

bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

}  // namespace

void check_text(std::string_view text, const std::string& name) {
  const auto fail = [&](size_t offset, const std::string& got, const std::string& advice) {
    throw Error(ErrorClass::kCorruption,
                {name + ":" + std::to_string(line_of_offset(text, offset)), got, "UTF-8 text", advice});
  };
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    fail(nul, "a NUL byte at offset " + std::to_string(nul), "the file is binary, damaged or UTF-16; save it as UTF-8");
  if (const auto bad = first_invalid_utf8(text))
    fail(*bad, "a byte that is not UTF-8 at offset " + std::to_string(*bad), "save the file as UTF-8");
}

RowReader::RowReader(std::string_view text, std::string name) : text_(text), name_(std::move(name)) {
  check_text(text_, name_);
  if (text_.substr(0, 3) == "\xEF\xBB\xBF") at_ = 3;
  skip_space();
  if (at_ == text_.size())
    throw Error(ErrorClass::kCorruption,
                {name_, "the file is empty", kExpectedForm, "check the path, or that the download is complete"});
  if (text_[at_] == '[') {
    ++at_;
    return;
  }
  if (text_[at_] != '{') fail(at_, "text that is neither [ nor {", kExpectedForm, "check that this is a JSON file");
  // JSON lines if the first line is an object of its own; else one object or several, printed over many lines.
  const size_t end_of_line = std::min(text_.find('\n', at_), text_.size());
  form_ = nlohmann::json::accept(text_.substr(at_, end_of_line - at_)) ? Form::kLines : Form::kObjects;
}

void RowReader::fail(size_t offset, const std::string& got, const std::string& expected,
                     const std::string& advice) const {
  throw Error(ErrorClass::kCorruption, {where(line_of_offset(text_, offset)), got, expected, advice});
}

void RowReader::skip_space() {
  for (; at_ < text_.size() && is_space(text_[at_]); ++at_)
    if (text_[at_] == '\n') ++line_;
}

size_t RowReader::object_end(size_t begin) const {
  int depth = 0;
  bool in_string = false;
  for (size_t i = begin; i < text_.size(); ++i) {
    const char c = text_[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kMaxJsonDepth)
        fail(i, "nesting of more than " + std::to_string(kMaxJsonDepth) + " levels", "a row of a facts file",
             "check that this is a facts file");
    } else if ((c == '}' || c == ']') && --depth == 0) {
      return i + 1;
    }
  }
  fail(begin, in_string ? "the row that starts here ends inside a string" : "the row that starts here has no end",
       "a complete JSON object", "the file is cut off, or a quote or bracket is missing");
}

void RowReader::parse(size_t begin, size_t end, Row& row) const {
  std::optional<JsonFault> fault;
  row.value = parse_json(text_.substr(begin, end - begin), {.max_depth = kMaxJsonDepth, .repeated_keys = true}, fault);
  if (fault)
    fail(begin + fault->offset, fault->what, "a JSON object",
         "check commas, quotes, brackets and numbers at this line");
}

bool RowReader::next_line(Row& row) {
  const size_t end = std::min(text_.find('\n', at_), text_.size());
  row.line = line_;
  if (text_[at_] == '{') (void)object_end(at_);  // depth, and a message for a line that is cut off
  parse(at_, end, row);
  at_ = end;
  return true;
}

bool RowReader::next(Row& row) {
  skip_space();
  if (done_) {
    if (at_ < text_.size()) fail(at_, "text after the closing ]", "the end of the file", "remove it");
    return false;
  }
  if (form_ == Form::kArray) {
    if (at_ == text_.size()) fail(at_, "the array has no closing ]", "a complete JSON array", "the file is cut off");
    if (text_[at_] == ']') {
      ++at_;
      done_ = true;
      return next(row);
    }
    if (!first_) {
      if (text_[at_] != ',') fail(at_, "no comma before this row", "a comma between rows", "add it");
      ++at_;
      skip_space();
      if (at_ < text_.size() && text_[at_] == ']') fail(at_, "a comma after the last row", "]", "remove the comma");
      if (at_ == text_.size()) fail(at_, "the array has no closing ]", "a complete JSON array", "the file is cut off");
    }
  } else if (at_ == text_.size()) {
    return false;
  }
  first_ = false;
  if (text_[at_] != '{')
    fail(at_, "a row that is not an object", "rows of the form {\"prompt\": …}", "check the file's structure");
  if (form_ == Form::kLines) return next_line(row);
  const size_t end = object_end(at_);
  row.line = line_;
  parse(at_, end, row);
  line_ += std::count(text_.begin() + static_cast<std::ptrdiff_t>(at_),
                      text_.begin() + static_cast<std::ptrdiff_t>(end), '\n');
  at_ = end;
  return true;
}

}  // namespace emend::datasets::detail
