// Rows of a file with their line numbers, one at a time (a JSON array of objects, JSON lines, one object, or a table
// with a line of names), and their fields.
#pragma once

#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/datasets/fact.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace emend::datasets::detail {

constexpr int kMaxJsonDepth = 64;

struct Row {
  nlohmann::json value;                       ///< always an object
  int64_t line = 0;                           ///< line on which it starts, 1-based
  int64_t number = 0;                         ///< of the row, 1-based, where others start on the same line; else 0
  size_t begin = 0, end = 0;                  ///< where in the text; of an object alone
  std::map<std::string, std::string> broken;  ///< cells of a table that begin as JSON and are none: name and fault
};

/// Walks over text that outlives it. Bytes that are not UTF-8, NUL bytes, an empty text, cut-off JSON and nesting of
/// more than kMaxJsonDepth levels throw Error(kCorruption) with file and line.
class RowReader {
 public:
  RowReader(std::string_view text, std::string name);
  /// False at the end of the text. A line of JSON or a row of a table that is none goes to `bad` where that is given.
  bool next(Row& row, const std::function<void(const BadRow&)>& bad = {});
  [[nodiscard]] bool table() const noexcept { return form_ == Form::kTable; }
  [[nodiscard]] size_t position() const noexcept { return at_; }  ///< behind the last row
  [[nodiscard]] std::string where(const Row& row) const { return place_of(name_, row.line, row.number); }

 private:
  enum class Form { kArray, kLines, kObjects, kTable };
  [[noreturn]] void fail(size_t offset, const std::string& got, const std::string& expected,
                         const std::string& advice) const;
  void skip_space();
  [[nodiscard]] size_t object_end(size_t begin) const;
  bool next_row(Row& row);
  bool next_line(Row& row);
  [[noreturn]] void refuse_row(size_t offset) const;
  [[nodiscard]] std::vector<std::string> cells();
  bool begin_table();
  [[noreturn]] void refuse_form() const;
  bool next_of_table(Row& row);
  void parse(size_t begin, size_t end, Row& row) const;

  std::string_view text_;
  std::string name_;
  Form form_ = Form::kArray;
  size_t at_ = 0;
  int64_t line_ = 1;  ///< line of at_
  int64_t rows_ = 0;
  char separator_ = ',';
  std::vector<std::string> names_;  ///< of the columns of a table
  bool first_ = true, done_ = false;
};

/// Throws Error(kCorruption) naming the line if `text` holds a NUL byte or a byte that is not UTF-8.
void check_text(std::string_view text, const std::string& name);

// ---- typed access to the keys of a row; every refusal names file, line and field

/// "  Rome " -> "Rome". Of ASCII white space, and nothing where the text says nothing (core/utf8.h).
[[nodiscard]] std::string trim(std::string_view text);
/// Non-overlapping occurrences of `part` in `text`; 0 for an empty part.
[[nodiscard]] size_t count_of(std::string_view text, std::string_view part);
/// "a string", "a list", … for messages.
[[nodiscard]] std::string kind_of(const nlohmann::json& value);

/// An object of the file with a name for messages. Remembers which keys were read, so that the others can be kept.
class Fields {
 public:
  /// `object` must be a JSON object and outlive this; `path` is the way to it inside the row ("requested_rewrite."), or
  /// empty; `unread` gets what rest() leaves.
  Fields(const nlohmann::json& object, std::string where, std::string path = "",
         std::vector<UnreadKey>* unread = nullptr)
      : object_(object), where_(std::move(where)), path_(std::move(path)), unread_(unread) {}
  /// A whole row. Both must outlive this.
  Fields(const Row& row, std::string where, std::vector<UnreadKey>* unread)
      : Fields(row.value, std::move(where), "", unread) {
    broken_ = &row.broken;
  }

  [[nodiscard]] bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
  [[nodiscard]] const nlohmann::json& raw(const char* key);  ///< null if absent

  [[nodiscard]] std::string text(const char* key);  ///< required, not blank, as it is
  [[nodiscard]] std::string text_or(const char* key, std::string fallback = "");
  [[nodiscard]] int64_t integer_or(const char* key, int64_t fallback);
  [[nodiscard]] std::vector<std::string> texts(
      const char* key);                          ///< a list of strings or one string; absent: none; blanks dropped
  [[nodiscard]] Fields object(const char* key);  ///< required
  [[nodiscard]] Fields within(const nlohmann::json& value, const std::string& path) const;  ///< an object at `path`
  [[nodiscard]] const nlohmann::json& list(const char* key);                                ///< required

  /// Right answers in every spelling that files use: a string, a number (1969.0 is "1969"), a list, a list of alias
  /// lists, {"str": …}.
  /// Flattened in order, trimmed, blanks and repetitions dropped.
  [[nodiscard]] std::vector<std::string> answers(const char* key);
  [[nodiscard]] std::vector<std::string> answers_of(const nlohmann::json& value, const std::string& name) const;

  /// Keys that the format has and the fact keeps as they are.
  void keep(std::initializer_list<const char*> keys) { kept_.insert(keys.begin(), keys.end()); }
  /// Keys that nobody asked for, as they were; to be called last. Those that nobody named either are told to `unread`,
  /// as `kept` by the caller or lost.
  [[nodiscard]] nlohmann::json rest(bool kept = true) const;

  [[noreturn]] void fail(const std::string& key, const std::string& got, const std::string& expected,
                         const std::string& advice = "") const;
  [[noreturn]] void lacks(const std::string& key, const std::string& expected) const;  ///< names a key that is close
  [[nodiscard]] const std::string& where() const noexcept { return where_; }
  [[nodiscard]] const nlohmann::json& value() const noexcept { return object_; }

 private:
  [[nodiscard]] std::string number_text(const nlohmann::json& value, const std::string& name) const;

  const nlohmann::json& object_;
  std::string where_, path_;
  std::set<std::string> read_, kept_;
  std::vector<UnreadKey>* unread_;
  const std::map<std::string, std::string>* broken_ = nullptr;
};

/// The one of `keys` that `key` is probably a slip of (other capitals or punctuation, a wrong letter), or empty.
[[nodiscard]] std::string key_meant_by(const std::string& key, const std::set<std::string>& keys);

/// What there is to say of a key that means nothing, without its place.
[[nodiscard]] std::string unread_text(const UnreadKey& key);

/// The prompt as a template with exactly one "{}": as it is, or with the subject's only occurrence replaced. Throws
/// Error(kCorruption) if there are several "{}", or none and the subject is absent or occurs more than once.
[[nodiscard]] std::string slot_prompt(const std::string& prompt, const std::string& subject, const Fields& fields,
                                      const char* key);

}  // namespace emend::datasets::detail
