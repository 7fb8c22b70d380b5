#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace emend {

std::string formatted(const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  return text;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string utc_text(std::time_t time) {
  std::tm parts{};
  gmtime_r(&time, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

static bool continues(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}

std::string replace_all(std::string text, std::string_view from, std::string_view to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

std::vector<std::string> words_in(std::string_view text, const std::function<bool(size_t)>& joins) {
  std::vector<std::string> words(1);
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (std::isalnum(byte) || byte >= 0x80 || (joins && joins(i)))
      words.back() += text[i];
    else if (!words.back().empty())
      words.emplace_back();
  }
  if (words.back().empty()) words.pop_back();
  for (auto& word : words) word = lower(word);
  return words;
}

std::string hex(std::string_view bytes) {
  std::string text;
  text.reserve(2 * bytes.size());
  for (const unsigned char c : bytes) text.append({"0123456789abcdef"[c >> 4], "0123456789abcdef"[c & 15]});
  return text;
}

std::string percent(double share) {
  const double value = 100 * share;
  const bool fine = value < 9.995 || (value > 99 && value < 100);  // where the second digit says something
  return formatted("%.*f %%", fine ? 2 : 1, value);
}

std::string whole_percent(double share) {
  const double value = 100 * share;
  const bool close = (value > 0 && value < 0.5) || (value >= 99.5 && value < 100);
  return close ? formatted("%.2f %%", std::clamp(value, 0.01, 99.99)) : formatted("%.0f %%", std::round(value));
}

std::string short_number(double value) {
  return formatted("%.3g", value);
}

size_t width_of(const std::string& text) {
  return static_cast<size_t>(std::ranges::count_if(text, [](char c) { return !continues(c); }));
}

std::string shortened(const std::string& text, size_t width) {
  if (width_of(text) <= width) return text;
  size_t bytes = 0, seen = 0;
  while (bytes < text.size() && (continues(text[bytes]) || seen++ < width - 1)) ++bytes;
  return text.substr(0, bytes) + "…";
}

void TextTable::add(std::vector<std::string> row) {
  for (auto& cell : row) cell = printable(cell, false);
  rows_.push_back(std::move(row));
}

std::string TextTable::text(const std::string& indent) const {
  std::vector<size_t> widths(rows_.front().size(), 0);
  for (const auto& row : rows_)
    for (size_t c = 0; c < row.size() && c < widths.size(); ++c) widths[c] = std::max(widths[c], width_of(row[c]));
  std::string out;
  for (const auto& row : rows_) {
    std::string line = indent;
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string space(c < widths.size() ? widths[c] - width_of(row[c]) : 0, ' ');
      line += (c == 0 ? "" : "  ") + (c < left_ ? row[c] + space : space + row[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

static std::function<std::string(std::string_view)>& setting_spelling() {
  static std::function<std::string(std::string_view)> spelling;  // how one process talks; no model state
  return spelling;
}

std::string setting(std::string_view name, std::string_view value) {
  std::string text = setting_spelling() ? setting_spelling()(name) : std::string(name);
  if (!value.empty()) text.insert(std::min(text.find(' '), text.size()), " " + std::string(value));
  return text;
}

void spell_settings(std::function<std::string(std::string_view name)> spelling) {
  setting_spelling() = std::move(spelling);
}

std::string option_spelling(std::string_view name) {
  std::string text = "--" + std::string(name);
  std::ranges::replace(text, '_', '-');
  return text;
}

}  // namespace emend
