// Small pieces of messages: lists, counts, suggestions, tables.
#pragma once

#include <emend/core/error.h>

#include <charconv>
#include <ctime>
#include <functional>
#include <optional>
#include <vector>

namespace emend {

/// `text` with `item` behind it, and `separator` between them unless `text` is empty.
inline void append_item(std::string& text, std::string_view item, std::string_view separator = ", ") {
  if (!text.empty()) text += separator;
  text += item;
}

/// At most `most` bytes of `text`, cut between characters and marked with "…".
[[nodiscard]] inline std::string shorten(std::string_view text, size_t most = 80) {
  if (text.size() <= most) return std::string(text);
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80) --most;
  return std::string(text.substr(0, most)) + "…";
}

/// `text` with `to` for every `from`; what was put in is not looked at again.
[[nodiscard]] std::string replace_all(std::string text, std::string_view from, std::string_view to);

/// `text` without these characters at its ends.
[[nodiscard]] inline std::string_view trimmed(std::string_view text, std::string_view ends = " \t\n\r") {
  const size_t begin = text.find_first_not_of(ends);
  return begin == text.npos ? "" : text.substr(begin, text.find_last_not_of(ends) - begin + 1);
}

/// `text` with its ASCII capitals in lower case.
[[nodiscard]] inline std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return result;
}

/// The words of `text` in lower case: runs of ASCII letters and digits, bytes of other scripts, and places of which
/// `joins` says so.
[[nodiscard]] std::vector<std::string> words_in(std::string_view text, const std::function<bool(size_t)>& joins = {});

/// The elements of `range`, each as `projection` (a member, a function) gives its text, with `separator` between them.
template <class Range, class Projection = std::identity>
[[nodiscard]] std::string join(const Range& range, std::string_view separator = ", ", Projection projection = {}) {
  std::string text;
  bool first = true;
  for (const auto& element : range) {
    if (!first) text += separator;
    text += std::invoke(projection, element);
    first = false;
  }
  return text;
}

/// For join and closest names over maps.
inline constexpr auto key_of = [](const auto& entry) -> const auto& {
  return entry.first;
};

/// The number that `text` is, from end to end (of `base`, for whole ones); nothing if it is none or does not fit.
template <class Number>
[[nodiscard]] std::optional<Number> number_in(std::string_view text, auto... base) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base...);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

/// As printf writes it, at most 511 bytes.
[[nodiscard, gnu::format(printf, 1, 2)]] std::string formatted(const char* format, ...);

/// Of a variable of the environment; empty if it is not set.
[[nodiscard]] std::string environment(const char* name);

/// "98.7 %", "0.12 %", "100 %"
[[nodiscard]] std::string percent(double share);
/// Without digits behind the point, but for what would look like 0 or 100 and is not: "66 %", "99.67 %".
[[nodiscard]] std::string whole_percent(double share);
/// Three significant digits: "0.0123", "4.56", "1.2e-07".
[[nodiscard]] std::string short_number(double value);
/// At most `width` characters, with "…" where something was cut off.
[[nodiscard]] std::string shortened(const std::string& text, size_t width);
/// Characters, where every code point counts one.
[[nodiscard]] size_t width_of(const std::string& text);
/// Two lower-case hexadecimal digits a byte.
[[nodiscard]] std::string hex(std::string_view bytes);

/// "2026-11-23T00:15:05Z".
[[nodiscard]] std::string utc_text(std::time_t time);

/// "1 fact", "2 facts".
[[nodiscard]] inline std::string counted(size_t count, const std::string& thing) {
  return std::to_string(count) + " " + thing + (count == 1 ? "" : "s");
}

/// "did you mean "…"?" with the candidate closest to `word`, or `otherwise` if none is close.
template <class Range, class Projection = std::identity>
[[nodiscard]] std::string did_you_mean(std::string_view word, const Range& candidates,
                                       const std::string& otherwise = "", Projection projection = {}) {
  const std::string close = closest_name(word, candidates, projection);
  return close.empty() ? otherwise : "did you mean \"" + close + "\"?";
}

/// Columns of text for people, padded by characters on the screen: rows of cells under a header; the first columns are
/// left-aligned, the others right-aligned.
class TextTable {
 public:
  /// So many columns are left-aligned.
  explicit TextTable(std::vector<std::string> header, size_t left = 1) : rows_{std::move(header)}, left_(left) {}
  /// What would break the columns is shown escaped.
  void add(std::vector<std::string> row);
  /// Every line begins with `indent`.
  [[nodiscard]] std::string text(const std::string& indent = "  ") const;

 private:
  std::vector<std::vector<std::string>> rows_;
  size_t left_;
};

}  // namespace emend
