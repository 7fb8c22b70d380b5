// Text for statistics: documents of a corpus, one at a time.
//
//   *.txt    paragraphs: blank lines separate documents; a file without blank lines has one document a line
//   JSON     one object a line, or an array of objects, with the document in "text"
// The form is told by the first character ('{' or '[' means JSON), not by the file's name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace emend::datasets {

struct Document {
  std::string text;  ///< not blank; without white space at its ends
  int64_t line = 0;  ///< line on which it starts
};

/// Hands the documents of a file to `sink` one after the other, until it returns false; blank ones are passed over. A
/// file of any size takes little memory: it is mapped, not loaded. Throws Error(kNotFound, kIo); Error(kCorruption) if
/// the file is empty, and with file and line for bytes that are not UTF-8, NUL bytes, broken JSON, a row without text,
/// or a document of more than `most_bytes`: such a file is not a corpus.
void read_corpus(const std::filesystem::path& path, const std::function<bool(Document)>& sink,
                 int64_t most_bytes = int64_t{64} << 20);

/// SHA-256 of the file's bytes: the corpus's part of a cache key. Throws Error(kNotFound, kIo).
[[nodiscard]] std::string corpus_hash(const std::filesystem::path& path);

}  // namespace emend::datasets
