// The one reader for JSON that comes from outside, with limits on depth, size and repeated keys.
//
// Goals: no text makes the process crash, hang or take memory without end (copying and printing a document go down its
// levels by recursion; a document takes about thirty times its text); every fault is told with file, line and column.
#pragma once

#include <emend/core/error.h>

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

namespace emend {

/// What a document may be, and what its reader says of one that is not.
struct JsonRules {
  int max_depth = 100;
  size_t max_bytes = size_t{64} << 20;
  bool repeated_keys = false;  ///< allowed; the last one counts
  ErrorClass error_class = ErrorClass::kCorruption;
  std::string expected = "a JSON document";
  std::string advice = "the file is truncated or damaged: fetch it again";
};

/// Where in a text a fault is, and which.
struct JsonFault {
  size_t offset = 0;
  std::string what;  ///< printable ASCII, at most 300 characters
};

/// Parses `text` (a byte order mark is skipped); null and `fault` set for one that is not as `rules` want it. Throws
/// nothing; for readers with messages of their own.
[[nodiscard]] nlohmann::json parse_json(std::string_view text, const JsonRules& rules, std::optional<JsonFault>& fault);

/// The same. Throws Error(rules.error_class) "WHERE:LINE:COLUMN: fault; expected …; advice".
[[nodiscard]] nlohmann::json parse_json(std::string_view text, const std::string& where, const JsonRules& rules = {});

/// What an accessor of documents objects to ("key 'active' not found"), without its library's own prefix; printable.
[[nodiscard]] std::string reason_of(const std::exception& error);

/// Parses a file. Throws as read_file and parse_json do.
[[nodiscard]] nlohmann::json read_json(const std::filesystem::path& path, const JsonRules& rules = {});

}  // namespace emend
