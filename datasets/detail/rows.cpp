#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/utf8.h>
#include <emend/datasets/detail/reader.h>
#include <emend/datasets/detail/rows.h>

#include <algorithm>
#include <cmath>

namespace emend::datasets::detail {
namespace {

constexpr const char* kExpectedForm =
    "a JSON array of objects, one JSON object a line, or a table (CSV) with a line of names";

bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

constexpr std::string_view kSpace = " \t\r\n\f\v";

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
  if (begin_table()) return;
  if (text_[at_] != '{')
    fail(at_, "text that is neither [ nor {, nor names with prompt and subject among them", kExpectedForm,
         "check that this is a facts file");
  // JSON lines if the first line is an object of its own; else one object or several, printed over many lines.
  const size_t end_of_line = std::min(text_.find('\n', at_), text_.size());
  form_ = nlohmann::json::accept(text_.substr(at_, end_of_line - at_)) ? Form::kLines : Form::kObjects;
}

void RowReader::fail(size_t offset, const std::string& got, const std::string& expected,
                     const std::string& advice) const {
  throw Error(ErrorClass::kCorruption, {where(line_of_offset(text_, offset)), got, expected, advice});
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
      ++at_;
      break;
    } else if (c == '"' && row.back().empty() && !closed) {
      quoted = true;
    } else if (c != '\r') {
      if (closed) fail(at_, "text behind a closing quote", "a separator", "double the quotes inside of quotes");
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
  separator_ = line.find('\t') != line.npos ? '\t' : line.find(',') == line.npos ? ';' : ',';
  form_ = Form::kTable;
  for (const auto& name : cells()) {
    names_.push_back(lower(trim(name)));
    if (names_.back().empty() || std::ranges::count(names_, names_.back()) > 1)
      throw Error(ErrorClass::kCorruption, {where(1), "the column name \"" + names_.back() + "\"",
                                            "a name of its own for every column", "prompt, subject, target_new, …"});
  }
  return true;
}

// Numbers and JSON where the short form has them; everything else is text.
nlohmann::json RowReader::value_of(const std::string& name, const std::string& cell) const {
  const bool number = name == "case_id", plain = name == "prompt" || name == "subject" || name.starts_with("target");
  if (!number && (plain || (cell[0] != '[' && cell[0] != '{'))) return cell;
  std::optional<JsonFault> fault;
  auto value = parse_json(cell, {.max_depth = kMaxJsonDepth}, fault);
  return fault ? nlohmann::json(cell) : value;
}

bool RowReader::next_of_table(Row& row) {
  skip_space();
  if (at_ == text_.size()) return false;
  row.line = line_;
  row.value = nlohmann::json::object();
  const auto values = cells();
  if (values.size() != names_.size())
    throw Error(ErrorClass::kCorruption,
                {where(row.line), "a row of " + counted(values.size(), "cell"),
                 counted(names_.size(), "cell") + ", as in the line of names", "put text with separators into quotes"});
  for (size_t i = 0; i < values.size(); ++i)
    if (!blank(values[i]) || names_[i] == "target_new") row.value[names_[i]] = value_of(names_[i], values[i]);
  return true;
}

bool RowReader::next(Row& row) {
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
  line_ += std::count(text_.begin() + at_, text_.begin() + end, '\n');
  at_ = end;
  return true;
}

std::string trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos || says_nothing(text)) return "";
  return std::string(text.substr(begin, text.find_last_not_of(kSpace) - begin + 1));
}

bool blank(std::string_view text) {
  return says_nothing(text);
}

size_t count_of(std::string_view text, std::string_view part) {
  size_t count = 0;
  if (part.empty()) return 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string_view::npos; at += part.size()) ++count;
  return count;
}

std::string kind_of(const nlohmann::json& value) {
  if (value.is_string()) return blank(value.get_ref<const std::string&>()) ? "blank" : "a string";
  if (value.is_number()) return "the number " + shorten(value.dump(), 30);
  return value.is_object() ? "an object" : value.is_array() ? "a list" : value.dump();
}

void Fields::fail(const std::string& key, const std::string& got, const std::string& expected,
                  const std::string& advice) const {
  throw Error(ErrorClass::kCorruption, {where_, "field \"" + path_ + key + "\" is " + got, expected, advice});
}

const nlohmann::json& Fields::raw(const char* key) {
  static const nlohmann::json kNull;
  read_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() ? kNull : *found;
}

std::string Fields::text(const char* key) {
  const nlohmann::json& value = raw(key);
  if (value.is_null() && !object_.contains(key)) fail(key, "missing", "a string");
  if (!value.is_string()) fail(key, kind_of(value), "a string");
  if (blank(value.get_ref<const std::string&>())) fail(key, "blank", "a string with text in it");
  return value.get<std::string>();
}

std::string Fields::text_or(const char* key, std::string fallback) {
  const nlohmann::json& value = raw(key);
  if (value.is_null()) return fallback;
  if (!value.is_string()) fail(key, kind_of(value), "a string");
  return value.get<std::string>();
}

int64_t Fields::integer_or(const char* key, int64_t fallback) {
  const nlohmann::json& value = raw(key);
  if (value.is_null()) return fallback;
  if (value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX))
    return value.get<int64_t>();
  if (value.is_number_integer() && !value.is_number_unsigned()) return value.get<int64_t>();
  if (value.is_number_float() && std::floor(value.get<double>()) == value.get<double>() &&
      std::abs(value.get<double>()) < 9e15)
    return static_cast<int64_t>(value.get<double>());
  fail(key, kind_of(value), "a whole number");
}

std::vector<std::string> Fields::texts(const char* key) {
  const nlohmann::json& value = raw(key);
  std::vector<std::string> result;
  if (value.is_null()) return result;
  if (value.is_string()) {
    if (!blank(value.get_ref<const std::string&>())) result.push_back(value.get<std::string>());
    return result;
  }
  if (!value.is_array()) fail(key, kind_of(value), "a list of strings");
  for (size_t i = 0; i < value.size(); ++i) {
    if (!value[i].is_string()) fail(std::string(key) + "[" + std::to_string(i) + "]", kind_of(value[i]), "a string");
    if (!blank(value[i].get_ref<const std::string&>())) result.push_back(value[i].get<std::string>());
  }
  return result;
}

Fields Fields::object(const char* key) {
  const nlohmann::json& value = raw(key);
  if (!value.is_object()) fail(key, object_.contains(key) ? kind_of(value) : "missing", "an object");
  return Fields(value, where_, path_ + key + ".");
}

const nlohmann::json& Fields::list(const char* key) {
  const nlohmann::json& value = raw(key);
  if (!value.is_array()) fail(key, object_.contains(key) ? kind_of(value) : "missing", "a list");
  return value;
}

std::vector<std::string> Fields::answers_of(const nlohmann::json& value, const std::string& name) const {
  std::vector<std::string> result;
  const auto add = [&](std::string text) {
    if (!text.empty() && std::ranges::find(result, text) == result.end()) result.push_back(std::move(text));
  };
  if (value.is_null()) return result;
  if (value.is_string()) {
    add(trim(value.get_ref<const std::string&>()));
  } else if (value.is_number()) {
    add(value.dump());
  } else if (value.is_object() && value.contains("str")) {
    return answers_of(value["str"], name + ".str");
  } else if (value.is_array()) {
    for (size_t i = 0; i < value.size(); ++i)
      for (std::string& text : answers_of(value[i], name + "[" + std::to_string(i) + "]")) add(std::move(text));
  } else {
    fail(name, kind_of(value), "a string, a list of strings, or a list of lists of aliases");
  }
  return result;
}

std::vector<std::string> Fields::answers(const char* key) {
  return answers_of(raw(key), key);
}

nlohmann::json Fields::rest() const {
  nlohmann::json kept = nlohmann::json::object();
  for (const auto& [key, value] : object_.items())
    if (!read_.contains(key)) kept[key] = value;
  return kept;
}

std::string slot_prompt(const std::string& prompt, const std::string& subject, const Fields& fields, const char* key) {
  const size_t slots = count_of(prompt, "{}");
  if (slots == 1) return prompt;
  const std::string shown = "\"" + shorten(prompt) + "\"";
  if (slots > 1)
    fields.fail(key, shown + " with " + std::to_string(slots) + " places for the subject", "exactly one {}",
                "write the subject out where it is not to be looked up");
  const size_t found = count_of(prompt, subject);
  if (found == 1) {
    std::string result = prompt;
    return result.replace(result.find(subject), subject.size(), "{}");
  }
  if (found == 0) {
    const bool other_case = count_of(lower(prompt), lower(subject)) == 1;
    fields.fail(
        key, shown + ", which holds neither {} nor the subject \"" + shorten(subject, 40) + "\"",
        "the subject once in the prompt, or {} in its place",
        other_case ? "the subject is there in other capitals: spell both alike" : "write {} where the subject belongs");
  }
  fields.fail(
      key, shown + ", in which the subject \"" + shorten(subject, 40) + "\" occurs " + std::to_string(found) + " times",
      "the subject once, or {} in its place", "write {} at the occurrence that is to be looked up");
}

const std::vector<const FactReader*>& fact_readers() {
  static const std::vector<const FactReader*> readers = {
#define EMEND_FACT_READER(name) &name##_reader,
#include <emend/datasets/readers.def>
#undef EMEND_FACT_READER
  };
  return readers;
}

bool any_has(const std::vector<nlohmann::json>& rows, std::initializer_list<const char*> keys) {
  return std::ranges::any_of(rows, [&](const nlohmann::json& row) {
    return std::ranges::all_of(keys, [&](const char* key) { return row.contains(key); });
  });
}

bool read_core(Fields& fields, const char* prompt_key, const char* target_key, Fact& fact, ParsedRow& row) {
  fact.case_id = fields.integer_or("case_id", kNoCaseId);
  fact.subject = trim(fields.text("subject"));
  fact.prompt = slot_prompt(fields.text(prompt_key), fact.subject, fields, prompt_key);
  if (!fields.value().contains(target_key)) fields.fail(target_key, "missing", "the new answer, a string");
  if (const auto& target = fields.raw(target_key); target.is_number())
    fields.fail(target_key, kind_of(target), "a string", "write \"" + target.dump() + "\" for that text");
  std::vector<std::string> targets = fields.answers(target_key);
  if (targets.empty()) {
    row.skipped = std::string("\"") + target_key + "\" is blank";
    return false;
  }
  fact.target_new = std::move(targets.front());
  targets.erase(targets.begin());
  if (!targets.empty()) fact.extra["target_new_aliases"] = targets;
  return true;
}

void set_true_answers(Fact& fact, std::vector<std::string> answers) {
  if (answers.empty()) return;
  fact.target_true = std::move(answers.front());
  answers.erase(answers.begin());
  fact.target_true_aliases = std::move(answers);
}

std::vector<std::string> true_answers(const Fact& fact) {
  auto answers = fact.target_true_aliases;
  if (fact.target_true) answers.insert(answers.begin(), *fact.target_true);
  return answers;
}

void read_prompt_lists(Fields& fields, Fact& fact) {
  for (const auto& list : kPromptLists) fact.*list.member = fields.texts(list.key);
}

/// One {prompt, ground_truth} object; both may be parallel lists.
static void read_probe_object(const Fields& fields, const nlohmann::json& value, const std::string& name,
                              std::vector<Probe>& probes) {
  if (!value.is_object()) fields.fail(name, kind_of(value), "an object with prompt and ground_truth");
  if (!value.contains("prompt")) fields.fail(name + ".prompt", "missing", "a string");
  const nlohmann::json& prompt = value["prompt"];
  const nlohmann::json& truth = value.contains("ground_truth") ? value["ground_truth"] : nlohmann::json();
  if (prompt.is_string()) {
    Probe probe{prompt.get<std::string>(), fields.answers_of(truth, name + ".ground_truth")};
    if (!blank(probe.prompt) && !probe.answers.empty()) probes.push_back(std::move(probe));
    return;
  }
  if (!prompt.is_array()) fields.fail(name + ".prompt", kind_of(prompt), "a string or a list of strings");
  if (!truth.is_array() || truth.size() != prompt.size())
    fields.fail(name + ".ground_truth", kind_of(truth), "a list as long as prompt", "give one answer for each prompt");
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (!prompt[i].is_string())
      fields.fail(name + ".prompt[" + std::to_string(i) + "]", kind_of(prompt[i]), "a string");
    Probe probe{prompt[i].get<std::string>(),
                fields.answers_of(truth[i], name + ".ground_truth[" + std::to_string(i) + "]")};
    if (!blank(probe.prompt) && !probe.answers.empty()) probes.push_back(std::move(probe));
  }
}

std::map<std::string, std::vector<Probe>> read_probes(Fields& fields, const char* key) {
  std::map<std::string, std::vector<Probe>> result;
  const nlohmann::json& groups = fields.raw(key);
  if (groups.is_null() || (groups.is_array() && groups.empty())) return result;
  if (!groups.is_object()) fields.fail(key, kind_of(groups), "an object of lists of probes");
  for (const auto& [name, group] : groups.items()) {
    std::vector<Probe> probes;
    const std::string path = std::string(key) + "." + name;
    if (group.is_array()) {
      for (size_t i = 0; i < group.size(); ++i)
        read_probe_object(fields, group[i], path + "[" + std::to_string(i) + "]", probes);
    } else if (!group.is_null()) {
      read_probe_object(fields, group, path, probes);
    }
    if (!probes.empty()) result[name] = std::move(probes);
  }
  return result;
}

void read_one_hop(Fields& fields, Fact& fact) {
  if (!fields.has("portability")) return;
  Fields hop = fields.object("portability");
  const std::string question = hop.text_or("New Question");
  std::vector<std::string> answers = hop.answers("New Answer");
  if (!blank(question) && !answers.empty()) fact.portability["one_hop"].push_back({question, std::move(answers)});
  if (hop.has("Recalled Relation")) fact.extra["recalled_relation"] = hop.text_or("Recalled Relation");
  const nlohmann::json rest = hop.rest();
  for (const auto& [key, value] : rest.items()) fact.extra["portability." + key] = value;
}

}  // namespace emend::datasets::detail
