// Reads the project's own sources, for tests about them: which files there are, and their text without comments.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace emend::testing {

inline const std::vector<std::string>& library_folders() {
  static const std::vector<std::string> folders = {"core",   "devices", "hparams",    "datasets", "hooks",
                                                   "models", "editors", "evaluation", "workflow"};
  return folders;
}

struct SourceFile {
  std::string path;    ///< from the top of the repository, "core/error.h"
  std::string folder;  ///< "core"
  std::string text;
  [[nodiscard]] bool is_header() const { return path.ends_with(".h"); }
  [[nodiscard]] bool is_private() const { return path.find("/detail/") != std::string::npos; }
};

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

/// Files below `folders` whose extension is one of `extensions`, sorted by path.
inline std::vector<SourceFile> source_files(const std::vector<std::string>& folders,
                                            const std::vector<std::string>& extensions = {".h", ".cpp", ".cu",
                                                                                          ".def"}) {
  const std::filesystem::path top = EMEND_SOURCE_DIR;
  std::vector<SourceFile> files;
  for (const auto& folder : folders) {
    if (!std::filesystem::is_directory(top / folder)) continue;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(top / folder)) {
      const auto extension = entry.path().extension().string();
      if (!entry.is_regular_file() || std::ranges::find(extensions, extension) == extensions.end()) continue;
      files.push_back({entry.path().lexically_relative(top).generic_string(), folder, read_text(entry.path())});
    }
  }
  std::ranges::sort(files, {}, &SourceFile::path);
  return files;
}

/// C++ text with comments, and on request the insides of string and character literals, replaced by spaces; line
/// breaks stay, so that line numbers do.
inline std::string without_comments(std::string_view text, bool blank_strings) {
  std::string out(text);
  const auto blank = [&](size_t from, size_t to) {
    for (size_t i = from; i < to && i < out.size(); ++i) {
      if (out[i] != '\n') out[i] = ' ';
    }
  };
  for (size_t i = 0; i < text.size();) {
    const auto rest = text.substr(i);
    size_t end = i + 1;
    if (rest.starts_with("//")) {
      end = std::min(text.find('\n', i), text.size());
      blank(i, end);
    } else if (rest.starts_with("/*")) {
      end = std::min(text.find("*/", i + 2), text.size() - 2) + 2;
      blank(i, end);
    } else if (rest.starts_with("R\"")) {
      const auto open = std::min(text.find('(', i), text.size() - 1);
      const std::string close = ")" + std::string(text.substr(i + 2, open - i - 2)) + "\"";
      const auto found = text.find(close, open);
      end = found == std::string_view::npos ? text.size() : found + close.size();
      if (blank_strings) blank(open + 1, end - close.size());
    } else if (text[i] == '"' ||
               (text[i] == '\'' && (i == 0 || !std::isalnum(static_cast<unsigned char>(text[i - 1]))))) {
      while (end < text.size() && text[end] != text[i] && text[end] != '\n') end += text[end] == '\\' ? 2 : 1;
      if (blank_strings) blank(i + 1, end);
      ++end;
    }
    i = end;
  }
  return out;
}

/// 1-based line of an offset.
inline size_t line_of(std::string_view text, size_t offset) {
  return 1 + static_cast<size_t>(std::ranges::count(text.substr(0, offset), '\n'));
}

}  // namespace emend::testing
