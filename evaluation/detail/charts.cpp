#include <emend/evaluation/detail/charts.h>
#include <emend/evaluation/detail/html.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace emend::evaluation::detail {
namespace {

constexpr double kWidth = 480, kHeight = 280, kLeft = 58, kRight = 12, kTop = 12, kBottom = 46;

std::string at(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.1f", value);
  return buffer;
}

std::string label(double x, double y, const std::string& text, const char* anchor, const std::string& extra = "") {
  return "<text x=\"" + at(x) + "\" y=\"" + at(y) + "\" text-anchor=\"" + anchor + "\"" + extra + ">" + escape(text) +
         "</text>";
}

std::string open_svg(double width, double height, const std::string& description) {
  return "<svg viewBox=\"0 0 " + at(width) + " " + at(height) + "\" role=\"img\" aria-label=\"" + escape(description) +
         "\">";
}

struct Axis {
  double low, high;
  bool log;
  double from, to;  // pixels
  [[nodiscard]] double operator()(double value) const {
    const auto scale = [&](double v) { return log ? std::log10(v) : v; };
    return from + (scale(value) - scale(low)) / (scale(high) - scale(low)) * (to - from);
  }
};

struct Range {
  double low = INFINITY, high = -INFINITY;
  void take(double value, bool log) {
    if (!std::isfinite(value) || (log && value <= 0)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  /// Opens an empty or single-valued range.
  void settle(bool log) {
    if (low > high) low = log ? 1 : 0, high = log ? 10 : 1;
    if (low == high) {
      if (log)
        low /= 2, high *= 2;
      else
        low -= 0.5, high += 0.5;
    }
  }
};

std::vector<double> axis_ticks(const Axis& axis) {
  if (!axis.log) return ticks(axis.low, axis.high, 5);
  std::vector<double> out;
  const auto first = static_cast<int>(std::ceil(std::log10(axis.low) - 1e-9)),
             last = static_cast<int>(std::floor(std::log10(axis.high) + 1e-9));
  const int step = std::max(1, (last - first) / 5 + 1);
  for (int power = first; power <= last; power += step) out.push_back(std::pow(10.0, power));
  return out.size() >= 2 ? out : std::vector<double>{axis.low, axis.high};
}

std::string draw_axes(const Axis& x, const Axis& y, const LineChart& chart) {
  std::string out;
  for (double tick : axis_ticks(y)) {
    out += "<line class=\"grid\" x1=\"" + at(x.from) + "\" x2=\"" + at(x.to) + "\" y1=\"" + at(y(tick)) + "\" y2=\"" +
           at(y(tick)) + "\"/>";
    out += label(x.from - 6, y(tick) + 4, significant(tick), "end");
  }
  for (double tick : axis_ticks(x)) {
    out += "<line class=\"grid\" x1=\"" + at(x(tick)) + "\" x2=\"" + at(x(tick)) + "\" y1=\"" + at(y.from) +
           "\" y2=\"" + at(y.from + 4) + "\"/>";
    out += label(x(tick), y.from + 18, significant(tick), "middle");
  }
  out += "<line class=\"axis\" x1=\"" + at(x.from) + "\" x2=\"" + at(x.to) + "\" y1=\"" + at(y.from) + "\" y2=\"" +
         at(y.from) + "\"/>";
  out += label((x.from + x.to) / 2, y.from + 38, chart.x_label, "middle", " class=\"name\"");
  out += label(0, 0, chart.y_label, "middle",
               " class=\"name\" transform=\"translate(13 " + at((y.from + y.to) / 2) + ") rotate(-90)\"");
  return out;
}

std::string draw_series(const Series& series, const Axis& x, const Axis& y) {
  std::string path, marks;
  bool pen_down = false;
  for (size_t i = 0; i < std::min(series.x.size(), series.y.size()); ++i) {
    const double value = series.y[i];
    if (!std::isfinite(value) || !std::isfinite(series.x[i]) || (y.log && value <= 0)) {
      pen_down = false;
      continue;
    }
    const double clipped = std::clamp(value, y.low, y.high);
    path += (pen_down ? "L" : "M") + at(x(series.x[i])) + " " + at(y(clipped));
    pen_down = true;
    if (series.points)
      marks += "<circle class=\"fill c" + std::to_string(series.colour) + "\" cx=\"" + at(x(series.x[i])) + "\" cy=\"" +
               at(y(clipped)) + "\" r=\"3\"><title>" +
               escape(series.name + ": " + significant(value) + " at " + significant(series.x[i])) +
               "</title></circle>";
  }
  if (path.empty()) return "";
  return "<path class=\"line c" + std::to_string(series.colour) + (series.faint ? " faint" : "") + "\" d=\"" + path +
         "\"/>" + marks;
}

std::string legend(const std::vector<Series>& series) {
  std::string out;
  for (const auto& one : series)
    if (!one.name.empty())
      out += "<span><i class=\"key c" + std::to_string(one.colour) + (one.faint ? " faint" : "") + "\"></i>" +
             escape(one.name) + "</span>";
  return out.empty() ? "" : "<div class=\"legend\">" + out + "</div>";
}

}  // namespace

std::vector<double> ticks(double low, double high, int count) {
  const double raw = (high - low) / std::max(count, 1);
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  const double share = raw / power;
  const double step = power * (share < 1.5 ? 1 : share < 3.5 ? 2 : share < 7.5 ? 5 : 10);
  std::vector<double> out;
  for (double k = std::ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; ++k)
    out.push_back(k * step == 0 ? 0 : k * step);
  return out;
}

std::string line_chart(const LineChart& chart) {
  Range across, up;
  for (const auto& series : chart.series)
    for (size_t i = 0; i < std::min(series.x.size(), series.y.size()); ++i) {
      if (!std::isfinite(series.y[i])) continue;
      across.take(series.x[i], false);
      up.take(series.y[i], chart.log_y);
    }
  if (chart.y_low) up.low = *chart.y_low;
  if (chart.y_high) up.high = *chart.y_high;
  across.settle(false);
  up.settle(chart.log_y);
  if (!chart.y_low && !chart.log_y && up.low > 0 && up.low < 0.5 * up.high) up.low = 0;
  const Axis x{across.low, across.high, false, kLeft, kWidth - kRight};
  const Axis y{up.low, up.high, chart.log_y, kHeight - kBottom, kTop};
  std::string out = open_svg(kWidth, kHeight, chart.description) + draw_axes(x, y, chart);
  for (const auto& series : chart.series) out += draw_series(series, x, y);
  return out + "</svg>" + legend(chart.series);
}

std::string heat_map(const HeatMap& map) {
  const size_t rows = map.values.size();
  size_t columns = 0;
  for (const auto& row : map.values) columns = std::max(columns, row.size());
  const double left = map.row_names.empty() ? 46 : 120;
  const double cell_width = (kWidth - left - kRight) / static_cast<double>(std::max<size_t>(columns, 1));
  const double cell_height = std::clamp(200.0 / static_cast<double>(std::max<size_t>(rows, 1)), 3.0, 24.0);
  const double bottom = kTop + cell_height * static_cast<double>(rows), height = bottom + 46;
  std::string out = open_svg(kWidth, height, map.description);
  for (size_t r = 0; r < rows; ++r) {
    const double y = kTop + cell_height * static_cast<double>(r);
    const size_t name_step = static_cast<size_t>(std::ceil(11 / cell_height));
    if (r < map.row_names.size() && r % name_step == 0)
      out += label(left - 5, y + cell_height / 2 + 4, shorten(map.row_names[r], 18), "end");
    for (size_t c = 0; c < map.values[r].size();) {
      const double value = map.values[r][c];
      size_t end = c + 1;  // cells of equal value become one rectangle
      while (end < map.values[r].size() && map.values[r][end] == value) ++end;
      if (std::isfinite(value)) {
        const double shade = std::clamp((value - map.low) / (map.high - map.low), 0.0, 1.0);
        char opacity[16];
        std::snprintf(opacity, sizeof opacity, "%.2f", 0.04 + 0.96 * shade);
        out += "<rect class=\"fill c" + std::to_string(map.colour) + "\" x=\"" +
               at(left + cell_width * static_cast<double>(c)) + "\" y=\"" + at(y) + "\" width=\"" +
               at(cell_width * static_cast<double>(end - c)) + "\" height=\"" + at(cell_height) + "\" fill-opacity=\"" +
               opacity + "\"/>";
      }
      c = end;
    }
  }
  out += "<rect class=\"frame\" x=\"" + at(left) + "\" y=\"" + at(kTop) + "\" width=\"" + at(kWidth - left - kRight) +
         "\" height=\"" + at(bottom - kTop) + "\"/>";
  const size_t name_step = std::max<size_t>(1, (map.column_names.size() + 9) / 10);
  for (size_t c = 0; c < map.column_names.size(); c += name_step)
    out += label(left + cell_width * (static_cast<double>(c) + 0.5), bottom + 16, map.column_names[c], "middle");
  out += label((left + kWidth - kRight) / 2, bottom + 36, map.x_label, "middle", " class=\"name\"");
  if (map.row_names.empty() || !map.y_label.empty())
    out += label(0, 0, map.y_label, "middle",
                 " class=\"name\" transform=\"translate(13 " + at((kTop + bottom) / 2) + ") rotate(-90)\"");
  out += "</svg><div class=\"legend\"><span>" + escape(significant(map.low) + map.unit) + " <i class=\"ramp c" +
         std::to_string(map.colour) + "\"></i> " + escape(significant(map.high) + map.unit) + "</span></div>";
  return out;
}

}  // namespace emend::evaluation::detail
