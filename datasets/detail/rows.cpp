#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/utf8.h>
#include <emend/datasets/detail/rows.h>

#include <algorithm>

namespace emend::datasets::detail {
namespace {

constexpr const char* kExpectedForm =
    "a JSON array of objects, one JSON object a line, or a table (CSV) whose first line names its columns";

bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

constexpr std::string_view kSpace = " \t\r\n\f\v";

char separator_of(std::string_view line) {
  return line.find('\t') != line.npos ? '\t' : line.find(',') == line.npos ? ';' : ',';
}

}  // namespace

void check_text(std::string_view text, const std::string& name) {
  const auto fail = [&](size_t offset, const std::string& got, const std::string& advice) {
    throw Error(ErrorClass::kCorruption, {place_of(name, line_of_offset(text, offset)), got, "UTF-8 text", advice});
  };
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    fail(nul, "a NUL byte at offset " + std::to_string(nul), "the file is binary, damaged or UTF-16; save it as UTF-8");
  if (const auto bad = first_invalid_utf8(text))
    fail(*bad, "a byte that is not UTF-8 at offset " + std::to_string(*bad), "save the file as UTF-8");
}

RowReader::RowReader(std::string_view text, std::string name) : text_(text), name_(std::move(name)) {
  check_text(text_, name_);
  if (text_.starts_with(kByteOrderMark)) at_ = kByteOrderMark.size();
  skip_space();
  if (text_.substr(at_).starts_with("sep=")) {  // for spreadsheet programs
    at_ = std::min(text_.find_first_of("\r\n", at_), text_.size());
    skip_space();
  }
  if (at_ == text_.size())
    throw Error(ErrorClass::kCorruption,
                {name_, "the file is empty", kExpectedForm, "check the path, or that the download is complete"});
  if (text_[at_] == '[') {
    ++at_;
    return;
  }
  if (begin_table()) return;
  const std::string_view start = text_.substr(at_, text_.find('\n', at_) - at_);
  const size_t behind = start.starts_with("{}") ? start.find_first_not_of(kSpace, 2) : start.npos;
  if (start[0] != '{' || (behind != start.npos && start[behind] != '{')) refuse_form();
  // JSON lines if the first line is an object of its own; else one object or several, printed over many lines.
  const size_t end_of_line = std::min(text_.find('\n', at_), text_.size());
  form_ = nlohmann::json::accept(text_.substr(at_, end_of_line - at_)) ? Form::kLines : Form::kObjects;
}

void RowReader::fail(size_t offset, const std::string& got, const std::string& expected,
                     const std::string& advice) const {
  throw Error(ErrorClass::kCorruption, {place_of(name_, line_of_offset(text_, offset)), got, expected, advice});
}

void RowReader::skip_space() {
  const auto passed = [&](char c) { return is_space(c) && !(form_ == Form::kTable && c == separator_); };
  for (; at_ < text_.size() && passed(text_[at_]); ++at_)
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
  row.begin = begin;
  row.end = text_.find_last_not_of(kSpace, end - 1) + 1;
  row.value = parse_json(text_.substr(begin, end - begin), {.max_depth = kMaxJsonDepth}, fault);
  if (fault)
    fail(begin + fault->offset, fault->what, "a JSON object with every key once",
         "check keys, commas, quotes, brackets and numbers at this line");
}

bool RowReader::next_line(Row& row) {
  const size_t begin = at_;
  at_ = std::min(text_.find('\n', at_), text_.size());  // also if this line is none
  if (text_[begin] != '{') refuse_row(begin);
  (void)object_end(begin);  // depth, and a message for a line that is cut off
  parse(begin, at_, row);
  return true;
}

void RowReader::refuse_row(size_t offset) const {
  if (text_[offset] == ',')
    fail(offset, "a comma between rows that stand in no list", "one object a line, or [ … ] around all",
         "put [ before the first row and ] behind the last, or remove the commas");
  fail(offset, "a row that is not an object", "rows of the form {\"prompt\": …}", "check the file's structure");
}

// One row of a table (RFC 4180): cells in quotes may hold separators, line breaks and doubled quotes.
std::vector<std::string> RowReader::cells() {
  std::vector<std::string> row(1);
  bool quoted = false, closed = false;
  const size_t begin = at_;
  for (; at_ < text_.size(); ++at_) {
    const char c = text_[at_];
    if (c == '\n') ++line_;
    if (quoted) {
      if (c != '"') {
        row.back() += c;
      } else if (at_ + 1 < text_.size() && text_[at_ + 1] == '"') {
        row.back() += text_[++at_];
      } else {
        quoted = false;
        closed = true;
      }
    } else if (c == separator_) {
      row.emplace_back();
      closed = false;
    } else if (c == '\n' || (c == '\r' && (at_ + 1 == text_.size() || text_[at_ + 1] != '\n'))) {
      if (c == '\r') ++line_;
      ++at_;
      break;
    } else if (c == '"' && says_nothing(row.back()) && !closed) {
      row.back().clear();
      quoted = true;
    } else if (c != '\r' && !(closed && is_space(c))) {
      if (closed) {
        const size_t place = at_;
        at_ = std::min(text_.find('\n', at_), text_.size());
        fail(place, "text behind a closing quote", "a separator", "double the quotes inside of quotes");
      }
      row.back() += c;
    }
  }
  if (quoted) fail(begin, "the row that starts here ends inside quotes", "a closing quote", "add it");
  return row;
}

bool RowReader::begin_table() {
  const std::string_view line = text_.substr(at_, text_.find_first_of("\r\n", at_) - at_);
  const std::string names = lower(line);
  if (names[0] == '{' || count_of(names, "prompt") == 0 || count_of(names, "subject") == 0) return false;
  separator_ = separator_of(line);
  form_ = Form::kTable;
  while (at_ > 0 && text_[at_ - 1] == separator_) --at_;  // columns without a name, where tabs separate
  for (const auto& name : cells()) {
    names_.push_back(lower(trim(name)));
    // An index or a trailing separator has no name, and is not read.
    if (!names_.back().empty() && std::ranges::count(names_, names_.back()) > 1)
      throw Error(ErrorClass::kCorruption, {place_of(name_, 1), "the column name \"" + names_.back() + "\"",
                                            "a name of its own for every column", "prompt, subject, target_new, …"});
  }
  return true;
}

// Text that is no form of a facts file: mostly a table without names.
void RowReader::refuse_form() const {
  const std::string_view line = text_.substr(at_, text_.find_first_of("\r\n", at_) - at_);
  std::string columns;
  if (line.find_first_of(",;\t") != line.npos)
    for (size_t begin = 0, end = 0; end != line.npos; begin = end + 1) {
      end = line.find(separator_of(line), begin);
      append_item(columns, "\"" + shorten(trim(line.substr(begin, end - begin)), 40) + "\"");
    }
  const std::string got = columns.empty() ? "text that is neither [ nor {, nor names of columns"
                                          : "a first line that does not name the columns prompt and subject, but has " +
                                                shorten(columns, 200);
  fail(at_, got, kExpectedForm,
       columns.empty() ? "check that this is a facts file"
                       : "put a line of names above the rows, in the order of their cells: prompt,subject,target_new");
}

// Numbers and JSON where the short form has them; everything else is text.
static nlohmann::json value_of(const std::string& name, const std::string& cell, Row& row) {
  const bool number = name == "case_id";
  const bool plain = name == "prompt" || name == "subject" || name == "target_new" || name == "target";
  const size_t first = cell.find_first_not_of(kSpace);
  const bool json =
      first != std::string::npos && (cell[first] == '[' || cell[first] == '{') && cell.compare(first, 2, "{}") != 0;
  if (!number && (plain || !json)) return cell;
  std::optional<JsonFault> fault;
  auto value = parse_json(cell, {.max_depth = kMaxJsonDepth}, fault);
  if (!fault) return value;
  if (!number) row.broken[name] = fault->what;  // of no matter where nothing reads the column
  return cell;
}

bool RowReader::next_of_table(Row& row) {
  std::vector<std::string> values;
  do {  // rows of separators alone are none
    skip_space();
    if (at_ == text_.size()) return false;
    row.line = line_;
    values = cells();
  } while (std::ranges::all_of(values, [](const std::string& cell) { return says_nothing(cell); }));
  row.value = nlohmann::json::object();
  row.broken.clear();
  if (values.size() != names_.size())
    throw Error(ErrorClass::kCorruption,
                {where(row), "a row of " + counted(values.size(), "cell"),
                 counted(names_.size(), "cell") + ", as in the line of names", "put text with separators into quotes"});
  const std::string target = std::ranges::count(names_, "target_new") > 0 ? "target_new" : "target";
  for (size_t i = 0; i < values.size(); ++i)
    if (!names_[i].empty() && (!says_nothing(values[i]) || names_[i] == target))
      row.value[names_[i]] = value_of(names_[i], values[i], row);
  return true;
}

bool RowReader::next_row(Row& row) {
  if (form_ == Form::kTable) return next_of_table(row);
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
      return next_row(row);
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
  const bool follows = !first_ && row.line == line_;
  first_ = false;
  row.line = line_;
  ++rows_;
  if (form_ == Form::kLines) return next_line(row);
  if (text_[at_] != '{') refuse_row(at_);
  const size_t end = object_end(at_), next = text_.find_first_not_of(" \t,", end);
  parse(at_, end, row);
  line_ += std::count(text_.begin() + at_, text_.begin() + end, '\n');
  const bool followed = row.line == line_ && next != text_.npos && text_[next] == '{';
  row.number = follows || followed ? rows_ : 0;
  at_ = end;
  return true;
}

bool RowReader::next(Row& row, const std::function<void(const BadRow&)>& bad) {
  for (;;) {
    try {
      return next_row(row);
    } catch (const Error& error) {
      if (!bad || (form_ != Form::kLines && form_ != Form::kTable)) throw;
      bad({row.line, error.what(), where(row)});
    }
  }
}

std::string trim(std::string_view text) {
  return says_nothing(text) ? "" : std::string(trimmed(text, kSpace));
}

size_t count_of(std::string_view text, std::string_view part) {
  size_t count = 0;
  if (part.empty()) return 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string_view::npos; at += part.size()) ++count;
  return count;
}

std::string kind_of(const nlohmann::json& value) {
  if (value.is_string()) return says_nothing(value.get_ref<const std::string&>()) ? "blank" : "a string";
  if (value.is_number()) return "the number " + shorten(value.dump(), 30);
  return value.is_object() ? "an object" : value.is_array() ? "a list" : value.dump();
}

}  // namespace emend::datasets::detail
