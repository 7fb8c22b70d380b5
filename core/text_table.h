// Columns of text for people: padded by characters on the screen, not by bytes.
#pragma once

#include <string>
#include <vector>

namespace emend {

/// "98.7 %", "0.12 %", "100 %"
[[nodiscard]] std::string percent(double share);
/// Three significant digits: "0.0123", "4.56", "1.2e-07".
[[nodiscard]] std::string short_number(double value);
/// At most `width` characters, with "…" where something was cut off.
[[nodiscard]] std::string shortened(const std::string& text, size_t width);
/// Characters, where every code point counts one.
[[nodiscard]] size_t width_of(const std::string& text);

/// Rows of cells under a header; the first columns are left-aligned, the others right-aligned.
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
