#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/sha256.h>
#include <emend/core/utf8.h>
#include <emend/datasets/corpus.h>
#include <emend/datasets/detail/rows.h>

#include <algorithm>
#include <string_view>

namespace emend::datasets {

/// Does a blank line separate anything within the first mebibyte?
static bool has_blank_lines(std::string_view text) {
  bool content = false;
  text = text.substr(0, size_t{1} << 20);
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const bool blank = detail::blank(text.substr(at, end - at));
    if (blank && content && !detail::blank(text.substr(end))) return true;
    content = content || !blank;
    at = end + 1;
  }
  return false;
}

struct CorpusReader::State {
  State(const std::filesystem::path& file, CorpusOptions chosen)
      : path(file.string()), options(std::move(chosen)), mapped(file) {
    text = {reinterpret_cast<const char*>(mapped.data()), mapped.size()};
    if (text.substr(0, 3) == "\xEF\xBB\xBF") at = 3;
    const size_t first = text.find_first_not_of(" \t\r\n", at);
    if (first == std::string_view::npos)
      throw Error(ErrorClass::kCorruption, {path, "the file is empty",
                                            "text, or JSON lines with \"" + options.text_key + "\"", "check the path"});
    json = text[first] == '{' || text[first] == '[';
    by_line =
        options.paragraphs == Paragraphs::kLines || (options.paragraphs == Paragraphs::kAuto && !has_blank_lines(text));
  }

  [[noreturn]] void fail(int64_t at_line, const std::string& got, const std::string& expected,
                         const std::string& advice) const {
    throw Error(ErrorClass::kCorruption, {path + ":" + std::to_string(at_line), got, expected, advice});
  }
  [[nodiscard]] std::string_view line_at(size_t begin) const {
    return text.substr(begin, std::min(text.find('\n', begin), text.size()) - begin);
  }
  /// Checks bytes and length and takes the document, or nothing if it is blank.
  std::optional<Document> take(std::string_view bytes, int64_t first_line) const {
    if (std::ssize(bytes) > options.max_document_bytes)
      fail(first_line, "a document of " + std::to_string(bytes.size()) + " bytes",
           "documents of at most " + std::to_string(options.max_document_bytes) + " bytes",
           "separate documents with blank lines");
    const auto check = [&](std::optional<size_t> bad, const char* what) {
      if (bad)
        fail(first_line + line_of_offset(bytes, *bad) - 1, what, "UTF-8 text",
             "the file is binary or in another encoding; save it as UTF-8");
    };
    const size_t nul = bytes.find('\0');
    check(nul == std::string_view::npos ? std::nullopt : std::optional(nul), "a NUL byte");
    check(first_invalid_utf8(bytes), "a byte that is not UTF-8");
    Document document{detail::trim(bytes), first_line};
    if (document.text.empty()) return std::nullopt;
    return document;
  }
  std::optional<Document> next_text();
  std::optional<Document> next_json();

  std::string path;
  CorpusOptions options;
  MappedFile mapped;
  std::string_view text;
  size_t at = 0;
  int64_t line = 1;
  bool json = false, by_line = false;
  std::unique_ptr<detail::RowReader> array;  ///< only for a JSON array
};

std::optional<Document> CorpusReader::State::next_text() {
  while (at < text.size()) {
    const size_t begin = at;
    const int64_t first_line = line;
    size_t end = begin;
    while (at < text.size()) {
      const std::string_view row = line_at(at);
      if (!by_line && detail::blank(row) && at > begin) break;
      end = at + row.size();
      at = std::min(end + 1, text.size());
      ++line;
      if (by_line || detail::blank(row)) break;
      if (static_cast<int64_t>(end - begin) > options.max_document_bytes) break;
    }
    if (auto document = take(text.substr(begin, end - begin), first_line)) return document;
  }
  return std::nullopt;
}

std::optional<Document> CorpusReader::State::next_json() {
  const auto text_of = [&](const nlohmann::json& row, int64_t row_line) -> std::optional<Document> {
    if (!row.is_object())
      fail(row_line, "a row that is not an object", "{\"" + options.text_key + "\": …}", "check the file's structure");
    const auto found = row.find(options.text_key);
    if (found == row.end() || !found->is_string())
      fail(row_line,
           "field \"" + options.text_key + "\" is " + (found == row.end() ? "missing" : detail::kind_of(*found)),
           "the document as a string", "check the file's keys");
    return take(found->get_ref<const std::string&>(), row_line);
  };
  const size_t first = text.find_first_not_of(" \t\r\n", at);
  if (!array && first != std::string_view::npos && text[first] == '[' && line == 1)
    array = std::make_unique<detail::RowReader>(text, path);
  if (array) {
    detail::Row row;
    while (array->next(row)) {
      line = row.line;
      if (auto document = text_of(row.value, row.line)) return document;
    }
    at = text.size();
    return std::nullopt;
  }
  // One line at a time: a corpus may be larger than what one wants to check before starting.
  while (at < text.size()) {
    const std::string_view bytes = line_at(at);
    const int64_t row_line = line++;
    at = std::min(at + bytes.size() + 1, text.size());
    if (!take(bytes, row_line)) continue;
    detail::Row row;
    try {
      detail::RowReader reader(bytes, path);
      if (!reader.next(row)) continue;
    } catch (const Error&) {
      fail(row_line, "a line that is not a JSON object", "one complete JSON object a line",
           "the file is cut off, or printed over several lines");
    }
    if (auto document = text_of(row.value, row_line)) return document;
  }
  return std::nullopt;
}

CorpusReader::CorpusReader(const std::filesystem::path& path, CorpusOptions options)
    : state_(std::make_unique<State>(path, std::move(options))) {}
CorpusReader::~CorpusReader() = default;
CorpusReader::CorpusReader(CorpusReader&&) noexcept = default;
CorpusReader& CorpusReader::operator=(CorpusReader&&) noexcept = default;

std::optional<Document> CorpusReader::next() {
  return state_->json ? state_->next_json() : state_->next_text();
}

double CorpusReader::fraction() const noexcept {
  return static_cast<double>(state_->at) / static_cast<double>(state_->text.size());
}

std::string corpus_hash(const std::filesystem::path& path) {
  const MappedFile file(path);
  Sha256 hash;
  hash.update(file.data(), file.size());
  return hash.hex();
}

}  // namespace emend::datasets
