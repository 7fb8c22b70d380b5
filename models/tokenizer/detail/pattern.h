// The "pattern" values of tokenizer files: {"String": "…"} or {"Regex": "…"}.
#pragma once

#include <emend/models/tokenizer/detail/json_view.h>
#include <emend/models/tokenizer/detail/regex.h>

#include <optional>

namespace emend::models::detail {

/// The compiled pattern; nothing for an empty string, which matches nothing. Throws Error(kCorruption).
[[nodiscard]] inline std::optional<Regex> make_pattern(const JsonView& view) {
  if (view.has("String")) {
    const std::string& text = view.at("String").string();
    if (text.empty()) return std::nullopt;
    return Regex::literal(text, view.where());
  }
  const JsonView regex = view.at("Regex");
  return Regex(regex.string(), regex.where());
}

}  // namespace emend::models::detail
