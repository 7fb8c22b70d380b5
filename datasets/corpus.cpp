#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/sha256.h>
#include <emend/core/utf8.h>
#include <emend/datasets/corpus.h>
#include <emend/datasets/detail/rows.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

namespace emend::datasets {

/// Does a blank line separate anything within the first mebibyte?
static bool has_blank_lines(std::string_view text) {
  bool content = false;
  text = text.substr(0, size_t{1} << 20);
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const bool blank = says_nothing(text.substr(at, end - at));
    if (blank && content && !says_nothing(text.substr(end))) return true;
    content = content || !blank;
    at = end + 1;
  }
  return false;
}

namespace {

class Corpus {
 public:
  Corpus(const std::filesystem::path& path, const std::function<bool(Document)>& sink, int64_t most_bytes)
      : path_(path.string()), sink_(sink), most_bytes_(most_bytes), mapped_(path) {}

  void read() {
    text_ = mapped_.text();
    if (text_.starts_with(kByteOrderMark)) at_ = kByteOrderMark.size();
    const size_t first = text_.find_first_not_of(" \t\r\n", at_);
    if (first == std::string_view::npos)
      throw Error(ErrorClass::kCorruption,
                  {path_, "the file is empty", R"(text, or JSON lines with "text")", "check the path"});
    const size_t second = std::min(text_.find_first_not_of(" \t\r\n", first + 1), text_.size() - 1);
    if (text_[first] == '[' && std::strchr("{]\"", text_[second])) return read_array();
    if (text_[first] == '{' && std::strchr("\"}", text_[second])) return read_lines();
    read_text();  // also "[Music] …"
  }

 private:
  [[noreturn]] void fail(int64_t line, const std::string& got, const std::string& expected,
                         const std::string& advice) const {
    throw Error(ErrorClass::kCorruption, {path_ + ":" + std::to_string(line), got, expected, advice});
  }
  [[nodiscard]] std::string_view line_at(size_t begin) const {
    return text_.substr(begin, std::min(text_.find('\n', begin), text_.size()) - begin);
  }
  /// Checks bytes and length and gives the document, or nothing if it is blank.
  [[nodiscard]] std::optional<Document> document(std::string_view bytes, int64_t line) const {
    if (std::ssize(bytes) > most_bytes_)
      fail(line, "a document of " + std::to_string(bytes.size()) + " bytes",
           "documents of at most " + std::to_string(most_bytes_) + " bytes", "separate documents with blank lines");
    const auto check = [&](std::optional<size_t> bad, const char* what) {
      if (bad)
        fail(line + line_of_offset(bytes, *bad) - 1, what, "UTF-8 text",
             "the file is binary or in another encoding; save it as UTF-8");
    };
    const size_t nul = bytes.find('\0');
    check(nul == std::string_view::npos ? std::nullopt : std::optional(nul), "a NUL byte");
    check(first_invalid_utf8(bytes), "a byte that is not UTF-8");
    Document document{detail::trim(bytes), line};
    if (document.text.empty()) return std::nullopt;
    return document;
  }
  /// False if no more documents are wanted.
  [[nodiscard]] bool give(std::string_view bytes, int64_t line) const {
    auto one = document(bytes, line);
    return !one || sink_(std::move(*one));
  }
  [[nodiscard]] bool give_row(const nlohmann::json& row, int64_t line) const {
    const auto found = row.find("text");
    if (found == row.end() || !found->is_string())
      fail(line, std::string("field \"text\" is ") + (found == row.end() ? "missing" : detail::kind_of(*found)),
           "the document as a string", "check the file's keys");
    return give(found->get_ref<const std::string&>(), line);
  }
  void read_text();
  void read_array() const;
  void read_lines();

  std::string path_;
  const std::function<bool(Document)>& sink_;
  int64_t most_bytes_;
  MappedFile mapped_;
  std::string_view text_;
  size_t at_ = 0;
  int64_t line_ = 1;
};

void Corpus::read_text() {
  const bool by_line = !has_blank_lines(text_);
  while (at_ < text_.size()) {
    const size_t begin = at_;
    const int64_t first_line = line_;
    size_t end = begin;
    while (at_ < text_.size()) {
      const std::string_view row = line_at(at_);
      if (!by_line && says_nothing(row) && at_ > begin) break;
      end = at_ + row.size();
      at_ = std::min(end + 1, text_.size());
      ++line_;
      if (by_line || says_nothing(row)) break;
      if (static_cast<int64_t>(end - begin) > most_bytes_) break;
    }
    if (!give(text_.substr(begin, end - begin), first_line)) return;
  }
}

void Corpus::read_array() const {
  detail::RowReader array(text_, path_);
  for (detail::Row row; array.next(row);)
    if (!give_row(row.value, row.line)) return;
}

// One line at a time: a corpus may be larger than what one wants to check before starting.
void Corpus::read_lines() {
  for (; at_ < text_.size(); ++line_) {
    const std::string_view bytes = line_at(at_);
    at_ = std::min(at_ + bytes.size() + 1, text_.size());
    if (!document(bytes, line_)) continue;
    std::optional<JsonFault> fault;
    const auto row = parse_json(bytes, {.max_depth = detail::kMaxJsonDepth}, fault);
    if (fault || !row.is_object())
      fail(line_, "a line that is not a JSON object", "one complete JSON object a line",
           "the file is cut off, or printed over several lines");
    if (!give_row(row, line_)) return;
  }
}

}  // namespace

void read_corpus(const std::filesystem::path& path, const std::function<bool(Document)>& sink, int64_t most_bytes) {
  Corpus(path, sink, most_bytes).read();
}

std::string corpus_hash(const std::filesystem::path& path) {
  return sha256_hex(MappedFile(path).text());
}

}  // namespace emend::datasets
