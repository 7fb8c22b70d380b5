// The report's pictures: how the optimisation went, what was written, what stayed, where it ran.
#include <emend/evaluation/detail/charts.h>
#include <emend/evaluation/detail/html.h>
#include <emend/evaluation/detail/report_sections.h>
#include <emend/evaluation/tracing.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace emend::evaluation::detail {
namespace {

using nlohmann::json;

constexpr size_t kCurvesMost = 150, kHeatRows = 40, kHeatColumns = 160;

std::string figure(const std::string& title, const std::string& note, const std::string& inside) {
  return "<figure class=\"card\" style=\"margin:0\"><h3>" + escape(title) + "</h3>" + inside +
         (note.empty() ? "" : "<p class=\"soft small\">" + escape(note) + "</p>") + "</figure>";
}

std::vector<double> steps_from(size_t first, size_t count) {
  std::vector<double> x(count);
  for (size_t i = 0; i < count; ++i) x[i] = static_cast<double>(i + first);
  return x;
}

/// Median over the curves at each step; curves that have stopped keep their last value.
std::vector<double> median_curve(const std::vector<std::vector<double>>& curves) {
  size_t longest = 0;
  for (const auto& curve : curves) longest = std::max(longest, curve.size());
  std::vector<double> out;
  for (size_t step = 0; step < longest; ++step) {
    std::vector<double> values;
    for (const auto& curve : curves)
      if (!curve.empty()) values.push_back(curve[std::min(step, curve.size() - 1)]);
    std::erase_if(values, [](double v) { return !std::isfinite(v); });
    if (values.empty()) {
      out.push_back(NAN);
      continue;
    }
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    out.push_back(values[values.size() / 2]);
  }
  return out;
}

std::string curves_figure(const json& curves, const char* key, const std::string& title, const std::string& y_label,
                          bool log, int colour) {
  if (!curves.is_array()) return "";
  LineChart chart;
  std::vector<std::vector<double>> all;
  for (const auto& curve : curves) {
    auto y = numbers(member(curve, {key}));
    if (!y.empty()) all.push_back(std::move(y));
  }
  if (all.empty()) return "";
  const size_t step = (all.size() + kCurvesMost - 1) / kCurvesMost;
  for (size_t i = 0; i < all.size(); i += step)
    chart.series.push_back({i == 0 && all.size() > 1 ? "one fact" : "", steps_from(1, all[i].size()), all[i], colour,
                            all.size() > 1, false});
  if (all.size() > 1) {
    const auto median = median_curve(all);
    chart.series.push_back({"median", steps_from(1, median.size()), median, colour, false, false});
  }
  chart.x_label = "step";
  chart.y_label = y_label;
  chart.log_y = log;
  if (!log) chart.y_low = 0, chart.y_high = 1;
  chart.description = title + " of " + std::to_string(all.size()) + " facts by optimisation step";
  return figure(title,
                step > 1 ? "every " + std::to_string(step) + "th of " + std::to_string(all.size()) + " facts" : "",
                line_chart(chart));
}

std::string bar(const std::string& name, const std::string& track, const std::string& value) {
  return "<div class=\"bar\"><span>" + escape(name) + "</span><span class=\"track\">" + track +
         "</span><span class=\"value\">" + value + "</span></div>";
}

std::string piece(double share, int colour, const std::string& title) {
  return "<i class=\"c" + std::to_string(colour) + "\" style=\"width:" + fixed(100 * std::clamp(share, 0.0, 1.0), 2) +
         "%\" title=\"" + escape(title) + "\"></i>";
}

std::string layers_figures(const json& layers) {
  if (!layers.is_array() || layers.empty()) return "";
  double highest = 0;
  for (const auto& layer : layers) highest = std::max(highest, number(layer, "update_norm").value_or(0));
  std::string bars;
  LineChart spectrum;
  int colour = 0;
  for (const auto& layer : layers) {
    const double norm = number(layer, "update_norm").value_or(0);
    const std::string name = "layer " + text(layer, "layer", "?");
    std::string value = significant(norm);
    if (const auto relative = number(layer, "relative"))
      value += " <span class=\"soft\">(" + fixed(100 * *relative, 2) + " %)</span>";
    bars +=
        bar(name, highest > 0 ? piece(norm / highest, 0, text(layer, "weight") + ": " + significant(norm)) : "", value);
    if (const auto kept = number(layer, "survived"); kept && *kept < 0.999)
      bars += "<p class=\"soft small\">" + escape(name) + ": " + fixed(100 * *kept, 1) +
              " % of the update survived the cast to the weights' type.</p>";
    auto values = numbers(member(layer, {"spectrum"}));
    if (!values.empty())
      spectrum.series.push_back({name, steps_from(1, values.size()), values, colour++ % 8, false, values.size() < 2});
  }
  std::string out =
      figure("Size of the update",
             "Frobenius norm of what was added to each edited matrix, and its share of the matrix's own norm.", bars);
  if (!spectrum.series.empty()) {
    spectrum.x_label = "singular value";
    spectrum.y_label = "size";
    spectrum.log_y = true;
    spectrum.description = "Singular values of the updates by layer";
    out += figure("Spectrum of the update", "", line_chart(spectrum));
  }
  return out;
}

std::string by_edits_figure(const json& rows) {
  if (!rows.is_array() || rows.size() < 2) return "";
  LineChart chart;
  int colour = 0;
  for (const auto& [key, name] : {std::pair{"efficacy_success", "efficacy"},
                                  {"paraphrase_success", "paraphrases"},
                                  {"neighborhood_success", "neighbours"},
                                  {"score", "score"},
                                  {"rewrite_acc", "rewrite"},
                                  {"rephrase_acc", "rephrase"},
                                  {"locality_acc", "locality"}}) {
    Series series{name, {}, {}, colour++, false, true};
    for (const auto& row : rows)
      if (const auto value = number(row, key)) {
        series.x.push_back(number(row, "edits").value_or(NAN));
        series.y.push_back(*value);
      }
    if (!series.x.empty()) chart.series.push_back(std::move(series));
  }
  if (chart.series.empty()) return "";
  chart.x_label = "edits so far";
  chart.y_label = "%";
  chart.y_low = 0;
  chart.y_high = 100;
  chart.description = "Metrics by number of edits";
  return figure("Against the number of edits", "", line_chart(chart));
}

/// Mean of a matrix over blocks so that it has at most the given numbers of rows and columns.
HeatMap shrink(const std::vector<std::vector<double>>& values, const std::vector<double>& steps) {
  HeatMap map;
  size_t columns = 0;
  for (const auto& row : values) columns = std::max(columns, row.size());
  const size_t by_row = (values.size() + kHeatRows - 1) / kHeatRows,
               by_column = std::max<size_t>(1, (columns + kHeatColumns - 1) / kHeatColumns);
  for (size_t r = 0; r < values.size(); r += by_row) {
    auto& row = map.values.emplace_back();
    for (size_t c = 0; c < columns; c += by_column) {
      double sum = 0, n = 0;
      for (size_t i = r; i < std::min(r + by_row, values.size()); ++i)
        for (size_t j = c; j < std::min(c + by_column, values[i].size()); ++j)
          if (std::isfinite(values[i][j])) sum += values[i][j], n += 1;
      row.push_back(n > 0 ? std::round(100 * sum / n) / 100 : NAN);
    }
    map.row_names.push_back(r < steps.size() ? fixed(steps[r], 0) + " edits" : "");
  }
  for (size_t c = 0; c < columns; c += by_column) map.column_names.push_back(std::to_string(c + 1));
  return map;
}

std::string retention_figure(const json& retention) {
  const json& rows = member(retention, {"probability"});
  if (!rows.is_array() || rows.empty()) return "";
  std::vector<std::vector<double>> values;
  for (const auto& row : rows) values.push_back(numbers(row));
  HeatMap map = shrink(values, numbers(member(retention, {"edits_applied"})));
  map.description = "Probability of each fact's new target after each number of edits";
  map.x_label = "fact, in the order of editing";
  map.colour = 2;
  return figure("Retention",
                "Probability of each fact's new answer after so many edits: what was written first should keep its "
                "colour further down.",
                heat_map(map));
}

std::string seconds_figure(const json& seconds) {
  if (!seconds.is_object()) return "";
  double highest = 0;
  for (const auto& item : seconds.items())
    if (item.key() != "total") highest = std::max(highest, as_number(item.value()).value_or(0));
  if (highest <= 0) return "";
  std::string bars;
  const std::vector<std::string> order = {"load", "statistics", "targets", "insert", "evaluate"};
  std::vector<std::string> keys = order;
  for (const auto& item : seconds.items())
    if (std::find(order.begin(), order.end(), item.key()) == order.end() && item.key() != "total")
      keys.push_back(item.key());
  for (const auto& key : keys)
    if (const auto value = number(seconds, key))
      bars += bar(key, piece(*value / highest, 1, key), escape(duration(*value)));
  if (const auto total = number(seconds, "total"))
    bars += "<p class=\"soft small\">total " + escape(duration(*total)) + "</p>";
  return figure("Time by phase", "", bars);
}

std::string memory_figure(const RunReport& run) {
  const json& detailed = member(run.extras, {"memory"});
  const json& peaks = member(run.results, {"peak_bytes"});
  const bool has_detail = detailed.is_object() && !detailed.empty();
  const json& devices = has_detail ? detailed : peaks;
  if (!devices.is_object() || devices.empty()) return "";
  const std::vector<std::string> parts = {"weights", "statistics", "solve", "activations", "kv_cache", "other"};
  double highest = 0;
  for (const auto& item : devices.items()) {
    double most = as_number(item.value()).value_or(0);
    for (const char* key : {"peak", "limit", "total"}) most = std::max(most, number(item.value(), key).value_or(0));
    highest = std::max(highest, most);
  }
  if (highest <= 0) return "";
  std::string bars;
  std::set<size_t> used;
  bool other = false;
  for (const auto& item : devices.items()) {
    const json& device = item.value();
    double sum = 0;
    std::string track;
    for (size_t i = 0; i < parts.size(); ++i)
      if (const auto value = number(device, parts[i]); value && *value > 0) {
        track += piece(*value / highest, static_cast<int>(i), parts[i] + ": " + bytes(*value));
        sum += *value;
        used.insert(i);
      }
    const double peak = as_number(device).value_or(std::max(sum, number(device, "peak").value_or(0)));
    if (peak > sum) track += piece((peak - sum) / highest, 7, "peak: " + bytes(peak));
    other = other || (sum > 0 && peak > sum);
    std::string value = escape(bytes(peak));
    if (const auto limit = number(device, "limit"))
      value += " <span class=\"soft\">of " + escape(bytes(*limit)) + "</span>";
    bars += bar(item.key(), track, value);
  }
  std::string legend;
  for (size_t i : used)
    legend += "<span><i class=\"key c" + std::to_string(i) + "\"></i>" + escape(parts[i]) + "</span>";
  if (other) legend += "<span><i class=\"key c7\"></i>work, caches and the program</span>";
  return figure("Peak memory by device", "",
                bars + (legend.empty() ? "" : "<div class=\"legend\">" + legend + "</div>"));
}

std::string trace_figures(const json& trace) {
  std::string out;
  for (TraceKind kind : {TraceKind::kState, TraceKind::kMlp, TraceKind::kAttention}) {
    std::string svg = summary_svg(trace, kind);
    if (svg.empty()) continue;
    const std::string name = " xmlns=\"http://www.w3.org/2000/svg\"";  // needed in a file of its own only
    if (const size_t at = svg.find(name); at != std::string::npos) svg.erase(at, name.size());
    out += figure("Causal tracing: " + std::string(to_string(kind)), "", svg);
  }
  return out;
}

// Of a fine-tuning: one value a step.
std::string training_figure(const json& losses) {
  const auto y = numbers(losses);
  if (y.empty()) return "";
  LineChart chart;
  chart.series.push_back({"", steps_from(1, y.size()), y, 0, false, false});
  chart.x_label = "step";
  chart.y_label = "loss (nat per token)";
  chart.description = "Training loss by optimiser step";
  return figure("Training loss", "", line_chart(chart));
}

}  // namespace

std::string plots_section(const RunReport& run) {
  const json& curves = member(run.extras, {"curves"});
  std::string out =
      training_figure(member(run.extras, {"training_loss"})) +
      curves_figure(curves, "loss", "Loss while looking for the targets", "loss", true, 0) +
      curves_figure(curves, "probability", "Probability of the new answer", "probability", false, 2) +
      layers_figures(member(run.extras, {"layers"})) + by_edits_figure(member(run.extras, {"efficacy_by_edits"})) +
      retention_figure(member(run.extras, {"retention"})) + seconds_figure(member(run.results, {"seconds"})) +
      memory_figure(run) + trace_figures(member(run.extras, {"trace"}));
  return out.empty() ? "" : "<section><h2>How it went</h2><div class=\"charts\">" + out + "</div></section>";
}

std::string devices_section(const RunReport& run) {
  std::vector<std::pair<std::string, std::string>> places;  // part, device
  std::set<std::string> edited;
  if (const json& placement = member(run.extras, {"placement"}); placement.is_object()) {
    places.emplace_back("embedding", text(placement, "embedding"));
    const json& layers = member(placement, {"layers"});
    std::vector<std::pair<int64_t, std::string>> ordered;
    if (layers.is_object())
      for (const auto& item : layers.items())
        ordered.emplace_back(std::strtoll(item.key().c_str(), nullptr, 10), as_text(item.value()));
    std::sort(ordered.begin(), ordered.end());
    for (const auto& [layer, device] : ordered) places.emplace_back(std::to_string(layer), device);
    places.emplace_back("head", text(placement, "head"));
    if (const json& list = member(placement, {"edited_layers"}); list.is_array())
      for (const auto& layer : list) edited.insert(as_text(layer));
  } else if (const json& map = member(run.results, {"device_map"}); map.is_object()) {
    std::vector<std::pair<int64_t, std::string>> ordered;
    for (const auto& item : map.items()) {
      const std::string& key = item.key();
      if (key.starts_with("layers."))
        ordered.emplace_back(std::strtoll(key.c_str() + 7, nullptr, 10), as_text(item.value()));
      else
        places.emplace_back(key, as_text(item.value()));
    }
    std::sort(ordered.begin(), ordered.end());
    for (const auto& [layer, device] : ordered) places.emplace_back(std::to_string(layer), device);
  }
  std::erase_if(places, [](const auto& place) { return place.second.empty(); });
  if (places.empty()) return "";
  std::vector<std::string> devices;
  std::string boxes, legend;
  for (const auto& [part, device] : places) {
    auto found = std::find(devices.begin(), devices.end(), device);
    if (found == devices.end()) found = devices.insert(devices.end(), device);
    const auto colour = std::to_string((found - devices.begin()) % 8);
    boxes += "<span class=\"c" + colour + (edited.count(part) ? " edited" : "") + "\" title=\"" +
             escape(part + " on " + device) + "\">" + escape(part) + "</span>";
  }
  for (size_t i = 0; i < devices.size(); ++i)
    legend += "<span><i class=\"key c" + std::to_string(i % 8) + "\"></i>" + escape(devices[i]) + "</span>";
  if (!edited.empty()) legend += "<span>framed: edited layers</span>";
  return "<section><h2>Where it ran</h2><div class=\"card\"><div class=\"map\">" + boxes +
         "</div><div class=\"legend\">" + legend + "</div></div></section>";
}

}  // namespace emend::evaluation::detail
