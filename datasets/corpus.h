// Text for statistics: documents of a corpus, one at a time.
//
//   *.txt    paragraphs: blank lines separate documents; a file without blank lines has one document a line
//   JSON     one object a line, or an array of objects, with the document in "text"
// The form is told by the first character ('{' or '[' means JSON), not by the file's name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

namespace emend::datasets {

struct Document {
  std::string text;  ///< not blank; without white space at its ends
  int64_t line = 0;  ///< line on which it starts
};

enum class Paragraphs { kAuto, kLines, kBlankLines };  ///< what separates the documents of a text file

struct CorpusOptions {
  Paragraphs paragraphs = Paragraphs::kAuto;       ///< for text files
  std::string text_key = "text";                   ///< for JSON
  int64_t max_document_bytes = int64_t{64} << 20;  ///< a longer document is an error: the file is not a corpus
};

/// Reads a file of any size with little memory (it is mapped, not loaded). Not thread-safe.
class CorpusReader {
 public:
  /// Throws Error(kNotFound, kIo); Error(kCorruption) if the file is empty.
  explicit CorpusReader(const std::filesystem::path& path, CorpusOptions options = {});
  ~CorpusReader();
  CorpusReader(CorpusReader&&) noexcept;
  CorpusReader& operator=(CorpusReader&&) noexcept;

  /// The next document; blank ones are passed over. Throws Error(kCorruption) with file and line for bytes that are not
  /// UTF-8, NUL bytes, broken JSON, or a row without text.
  [[nodiscard]] std::optional<Document> next();
  /// Share of the file that has been read, for progress.
  [[nodiscard]] double fraction() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// SHA-256 of the file's bytes: the corpus's part of a cache key. Throws Error(kNotFound, kIo).
[[nodiscard]] std::string corpus_hash(const std::filesystem::path& path);

}  // namespace emend::datasets
