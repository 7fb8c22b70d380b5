// Small charts as inline SVG. Colours come from the page's style sheet (classes c0 … c7, ink, grid), so they follow
// light and dark; each chart says in words what it shows.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace emend::evaluation::detail {

struct Series {
  std::string name;          ///< empty: not in the legend
  std::vector<double> x, y;  ///< points that are not finite break the line
  int colour = 0;            ///< class c0 … c7
  bool faint = false;        ///< one of many
  bool points = false;       ///< mark each point
};

struct LineChart {
  std::string description;  ///< for screen readers
  std::string x_label, y_label;
  std::vector<Series> series;
  bool log_y = false;
  std::optional<double> y_low, y_high;
};
[[nodiscard]] std::string line_chart(const LineChart& chart);

struct HeatMap {
  std::string description;
  std::string x_label, y_label;
  std::vector<std::string> row_names;  ///< empty: none are drawn
  std::vector<std::string> column_names;
  std::vector<std::vector<double>> values;  ///< [row][column]; not finite: left empty
  double low = 0, high = 1;
  std::string unit;
  int colour = 0;
};
[[nodiscard]] std::string heat_map(const HeatMap& map);

/// Round numbers from low to high, about `count` of them.
[[nodiscard]] std::vector<double> ticks(double low, double high, int count);

}  // namespace emend::evaluation::detail
