// Rows of a JSON file with their line numbers, one at a time: an array of objects, JSON lines, or one object.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace emend::datasets::detail {

constexpr int kMaxJsonDepth = 64;

struct Row {
  nlohmann::json value;  ///< always an object
  int64_t line = 0;      ///< line on which it starts, 1-based
};

/// Walks over text that outlives it. Bytes that are not UTF-8, NUL bytes, an empty text, cut-off JSON and nesting of
/// more than kMaxJsonDepth levels throw Error(kCorruption) with file and line.
class RowReader {
 public:
  RowReader(std::string_view text, std::string name);
  /// False at the end of the text.
  bool next(Row& row);
  /// "name:line"
  [[nodiscard]] std::string where(int64_t line) const { return name_ + ":" + std::to_string(line); }

 private:
  enum class Form { kArray, kLines, kObjects };
  [[noreturn]] void fail(size_t offset, const std::string& got, const std::string& expected,
                         const std::string& advice) const;
  void skip_space();
  [[nodiscard]] size_t object_end(size_t begin) const;
  bool next_line(Row& row);
  void parse(size_t begin, size_t end, Row& row) const;

  std::string_view text_;
  std::string name_;
  Form form_ = Form::kArray;
  size_t at_ = 0;
  int64_t line_ = 1;  ///< line of at_
  bool first_ = true, done_ = false;
};

/// Throws Error(kCorruption) naming the line if `text` holds a NUL byte or a byte that is not UTF-8.
void check_text(std::string_view text, const std::string& name);

}  // namespace emend::datasets::detail
