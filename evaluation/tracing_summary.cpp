// Averages of traces by kind of token, layers to edit, and heat maps.
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/evaluation/detail/page.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/tracing.h>

#include <algorithm>
#include <cmath>

namespace emend::evaluation {
namespace {

using nlohmann::json;

constexpr size_t kRows = 6, kLastSubject = 2;
const char* const kRowNames[kRows] = {"first subject token",    "middle subject tokens", "last subject token",
                                      "first subsequent token", "further tokens",        "last token"};

/// The row that a token's effect belongs to; -1: before the subject. A subject of one token is its last one; a token
/// that ends both the subject and the prompt counts as the subject's.
int row_of(const FactTrace& trace, int64_t token) {
  const auto length = static_cast<int64_t>(trace.tokens.size());
  if (token < trace.subject_begin) return -1;
  if (token == trace.subject_end - 1) return kLastSubject;
  if (token < trace.subject_end) return token == trace.subject_begin ? 0 : 1;
  if (token == length - 1) return 5;
  return token == trace.subject_end ? 3 : 4;
}

json numbers_or_null(const std::vector<double>& values) {
  json out = json::array();
  for (double value : values) out.push_back(std::isfinite(value) ? json(std::round(value * 1e6) / 1e6) : json());
  return out;
}

/// ROME's colours: purple for states, green for MLPs, red for attention.
const char* colour_of(TraceKind kind) {
  return kind == TraceKind::kState ? "#6a3d9a" : kind == TraceKind::kMlp ? "#1b7837" : "#b2182b";
}

std::string title_of(TraceKind kind, int window) {
  if (kind == TraceKind::kState) return "restoring single states";
  return std::string("restoring ") + (kind == TraceKind::kMlp ? "MLP" : "attention") + " outputs of " +
         std::to_string(window) + " layers";
}

struct Map {
  std::string title, scale_name;
  std::vector<std::string> rows;
  std::vector<std::vector<double>> values;
  double low = 0, high = 1;
  std::string colour;
};

std::string at(double value) {
  return detail::fixed(value, 1);
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : printable(text, false))
    out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '"' ? "&quot;" : std::string(1, c);
  return out;
}

/// A complete SVG document.
std::string draw(const Map& map) {
  constexpr double kLeft = 172, kCell = 20, kTop = 32, kBar = 84;
  const size_t layers = map.values.empty() ? 0 : map.values[0].size();
  const double cell_width = std::clamp(330.0 / static_cast<double>(std::max<size_t>(layers, 1)), 5.0, 26.0);
  const double right = kLeft + cell_width * static_cast<double>(layers),
               bottom = kTop + kCell * static_cast<double>(map.rows.size());
  const double width = std::max(right + kBar, 590.0), height = bottom + 48;
  const std::string text = " style=\"font:15px system-ui,sans-serif;fill:var(--ink,currentColor)\"";
  std::string out = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + at(width) + " " + at(height) +
                    "\" width=\"" + at(width) + "\" height=\"" + at(height) + "\" role=\"img\" aria-label=\"" +
                    escaped(map.title) + "\">";
  const auto label = [&](double x, double y, const char* anchor, const std::string& words) {
    out += "<text x=\"" + at(x) + "\" y=\"" + at(y) + "\" text-anchor=\"" + anchor + "\"" + text + ">" +
           escaped(words) + "</text>";
  };
  label(8, 20, "start", map.title);
  const auto shade = [&](double value) {
    return detail::fixed(std::clamp((value - map.low) / std::max(map.high - map.low, 1e-12), 0.0, 1.0), 3);
  };
  for (size_t r = 0; r < map.rows.size(); ++r) {
    label(kLeft - 6, kTop + kCell * (static_cast<double>(r) + 0.78), "end", detail::shorten(map.rows[r], 24));
    for (size_t l = 0; l < map.values[r].size(); ++l)
      if (std::isfinite(map.values[r][l]))
        out += "<rect x=\"" + at(kLeft + cell_width * static_cast<double>(l)) + "\" y=\"" +
               at(kTop + kCell * static_cast<double>(r)) + "\" width=\"" + at(cell_width) + "\" height=\"" + at(kCell) +
               "\" fill=\"" + map.colour + "\" fill-opacity=\"" + shade(map.values[r][l]) + "\"/>";
  }
  out += "<rect x=\"" + at(kLeft) + "\" y=\"" + at(kTop) + "\" width=\"" + at(right - kLeft) + "\" height=\"" +
         at(bottom - kTop) + "\" fill=\"none\" stroke=\"currentColor\" stroke-opacity=\"0.4\"/>";
  const size_t step = std::max<size_t>(1, (layers + 7) / 8);
  for (size_t l = 0; l < layers; l += step)
    label(kLeft + cell_width * (static_cast<double>(l) + 0.5), bottom + 18, "middle", std::to_string(l));
  label((kLeft + right) / 2, bottom + 40, "middle", "layer");
  for (int i = 0; i < 20; ++i)
    out += "<rect x=\"" + at(right + 14) + "\" y=\"" + at(bottom - (bottom - kTop) * (i + 1) / 20) +
           "\" width=\"12\" height=\"" + at((bottom - kTop) / 20 + 0.3) + "\" fill=\"" + map.colour +
           "\" fill-opacity=\"" + detail::fixed((i + 0.5) / 20, 3) + "\"/>";
  label(right + 31, kTop + 10, "start", detail::significant(map.high));
  label(right + 31, bottom, "start", detail::significant(map.low));
  label(right + 14, bottom + 40, "start", map.scale_name);
  return out + "</svg>";
}

std::vector<std::vector<double>> matrix(const json& rows) {
  std::vector<std::vector<double>> out;
  if (rows.is_array())
    for (const auto& row : rows) out.push_back(detail::numbers(row));
  return out;
}

/// Standard error over facts of the MLP effect at the subject's last token.
double peak_error(const TraceSummary& summary, size_t layer) {
  double sum = 0, squares = 0;
  const auto n = static_cast<double>(summary.traces.size());
  for (const auto& trace : summary.traces) {
    const double effect =
        trace.restored.at(TraceKind::kMlp)[static_cast<size_t>(trace.subject_end - 1)][layer] - trace.corrupted;
    sum += effect;
    squares += effect * effect;
  }
  return n < 2 ? 0 : std::sqrt(std::max(0.0, squares - sum * sum / n) / (n - 1) / n);
}

}  // namespace

void average(TraceSummary& summary, const std::vector<TraceKind>& kinds) {
  summary.rows.assign(kRowNames, kRowNames + kRows);
  const auto layers = static_cast<size_t>(summary.n_layers);
  summary.clean = summary.corrupted = 0;
  for (const auto& trace : summary.traces) {
    summary.clean += trace.clean / static_cast<double>(summary.traces.size());
    summary.corrupted += trace.corrupted / static_cast<double>(summary.traces.size());
  }
  for (TraceKind kind : kinds) {
    std::vector<std::vector<double>> sums(kRows, std::vector<double>(layers, 0));
    std::vector<double> counts(kRows, 0);
    for (const auto& trace : summary.traces) {
      // Several tokens of a kind count as one: their mean.
      std::vector<std::vector<double>> own(kRows, std::vector<double>(layers, 0));
      std::vector<double> n(kRows, 0);
      const auto& restored = trace.restored.at(kind);
      for (size_t t = 0; t < restored.size(); ++t) {
        const int row = row_of(trace, static_cast<int64_t>(t));
        if (row < 0) continue;
        n[static_cast<size_t>(row)] += 1;
        for (size_t l = 0; l < layers; ++l) own[static_cast<size_t>(row)][l] += restored[t][l] - trace.corrupted;
      }
      for (size_t row = 0; row < kRows; ++row) {
        if (n[row] == 0) continue;
        counts[row] += 1;
        for (size_t l = 0; l < layers; ++l) sums[row][l] += own[row][l] / n[row];
      }
    }
    for (size_t row = 0; row < kRows; ++row)
      for (double& value : sums[row]) value = counts[row] > 0 ? value / counts[row] : NAN;
    summary.effect[kind] = std::move(sums);
  }
}

json to_json(const TraceSummary& summary) {
  json out = {{"facts", summary.facts},     {"skipped", summary.skipped},     {"noise", summary.noise},
              {"clean", summary.clean},     {"corrupted", summary.corrupted}, {"window", summary.window},
              {"samples", summary.samples}, {"precision", summary.precision}, {"layers", summary.n_layers},
              {"rows", summary.rows},       {"effect", json::object()},       {"traces", json::array()}};
  for (const auto& [kind, rows] : summary.effect)
    for (const auto& row : rows) out["effect"][std::string(to_string(kind))].push_back(numbers_or_null(row));
  for (const auto& trace : summary.traces) {
    json one = {{"known_id", trace.fact.known_id},
                {"prompt", trace.fact.prompt},
                {"subject", trace.fact.subject},
                {"tokens", trace.tokens},
                {"subject_tokens", {trace.subject_begin, trace.subject_end}},
                {"answer", trace.answer_text},
                {"clean", trace.clean},
                {"corrupted", trace.corrupted},
                {"draws", trace.draws},
                {"restored", json::object()}};
    for (const auto& [kind, rows] : trace.restored)
      for (const auto& row : rows) one["restored"][std::string(to_string(kind))].push_back(numbers_or_null(row));
    out["traces"].push_back(std::move(one));
  }
  return out;
}

json suggest_layers(const TraceSummary& summary, int count) {
  const auto found = summary.effect.find(TraceKind::kMlp);
  if (found == summary.effect.end() || summary.facts == 0)
    throw Error(ErrorClass::kInvalidArgument,
                {"suggested layers", "no traces of MLP outputs", "at least one traced fact with kind mlp",
                 "trace facts that the model knows"});
  const auto& effect = found->second[kLastSubject];
  // The first MLP works on the embedding that was noised: windows that hold it bring back the token, not the fact.
  auto first = effect.begin() + std::min<std::ptrdiff_t>(summary.window / 2 + 1, std::ssize(effect));
  if (first == effect.end()) first = effect.begin();
  const auto peak = std::max_element(first, effect.end()) - effect.begin();
  const double best = effect[static_cast<size_t>(peak)], error = peak_error(summary, static_cast<size_t>(peak));
  // The published choice: layers up to and including the peak, which the causal path from the subject to the answer
  // passes.
  const auto n = static_cast<std::ptrdiff_t>(effect.size());
  const auto last = std::clamp<std::ptrdiff_t>(peak, std::min<std::ptrdiff_t>(count, n) - 1, n - 1);
  json layers = json::array(), why = json::array();
  for (std::ptrdiff_t l = std::max<std::ptrdiff_t>(0, last - count + 1); l <= last; ++l) layers.push_back(l);
  std::ptrdiff_t low = peak, high = peak;  // within one standard error of the peak
  while (low > first - effect.begin() && effect[static_cast<size_t>(low) - 1] >= best - error) --low;
  while (high + 1 < n && effect[static_cast<size_t>(high) + 1] >= best - error) ++high;
  why.push_back("Restoring MLP outputs around layer " + std::to_string(peak) +
                " at the subject's last token brings back most of the answer: " + detail::fixed(best, 3) +
                (summary.facts > 1 ? " ± " + detail::fixed(error, 3) : "") + " of probability, from " +
                detail::fixed(summary.corrupted, 3) + " with a noised subject to " + detail::fixed(summary.clean, 3) +
                " without noise (" + counted(static_cast<size_t>(summary.facts), "fact") + ").");
  if (summary.facts > 1)
    why.push_back("Layers " + std::to_string(low) + " to " + std::to_string(high) +
                  " are within one standard error of that peak.");
  if (first != effect.begin())
    why.push_back("Windows that hold the first layer's MLP (up to layer " + std::to_string(first - effect.begin() - 1) +
                  ", effect " + detail::fixed(*std::max_element(effect.begin(), first), 3) +
                  ") are left out: that MLP reads the noised embedding itself, and restores the token, not the fact.");
  why.push_back("The range is the " + std::to_string(layers.size()) +
                " layers that end at the peak, as MEMIT chooses it: each passes on what the next needs.");
  if (summary.facts < 10 || best < 2 * error)
    why.push_back("Few facts, or a peak less than two standard errors above nothing: trace more before relying on it.");
  return {{"peak", peak},           {"layers", layers}, {"effect", best}, {"standard_error", error},
          {"facts", summary.facts}, {"why", why}};
}

std::string trace_svg(const FactTrace& trace, TraceKind kind) {
  const auto found = trace.restored.find(kind);
  if (found == trace.restored.end())
    throw Error(ErrorClass::kInvalidArgument, {"heat map", "no trace of kind " + std::string(to_string(kind)),
                                               "a kind that was traced", "add it to TraceOptions::kinds"});
  Map map{"p(" + trace.answer_text + "), " + title_of(kind, trace.window),
          "p",
          {},
          found->second,
          trace.corrupted,
          trace.corrupted,
          colour_of(kind)};
  for (size_t t = 0; t < trace.tokens.size(); ++t) {
    const bool subject = static_cast<int64_t>(t) >= trace.subject_begin && static_cast<int64_t>(t) < trace.subject_end;
    map.rows.push_back(trace.tokens[t] + (subject ? "*" : ""));
  }
  for (const auto& row : map.values)
    for (double value : row) map.high = std::max(map.high, value);
  return draw(map);
}

std::string summary_svg(const TraceSummary& summary, TraceKind kind) {
  return summary_svg(to_json(summary), kind);
}

std::string summary_svg(const json& summary, TraceKind kind) {
  const auto values = matrix(detail::member(summary, {"effect", to_string(kind)}));
  if (values.empty()) return "";
  Map map{
      "Average indirect effect, " + title_of(kind, static_cast<int>(detail::number(summary, "window").value_or(10))),
      "effect",
      {},
      values,
      0,
      0,
      colour_of(kind)};
  for (size_t r = 0; r < values.size(); ++r) {
    map.rows.emplace_back(r < kRows ? kRowNames[r] : "");
    for (double value : values[r])
      if (std::isfinite(value)) map.high = std::max(map.high, value);
  }
  return draw(map);
}

std::string trace_page(const TraceSummary& summary, const std::string& model_name, size_t facts) {
  json data = to_json(summary);
  data["page"] = "trace";
  data["model"] = model_name;
  auto& traces = data["traces"].get_ref<json::array_t&>();
  data["more"] = traces.size() - std::min(traces.size(), facts);
  traces.resize(std::min(traces.size(), facts));
  if (summary.effect.count(TraceKind::kMlp) && summary.facts > 0) data["suggested"] = suggest_layers(summary);
  return detail::fill_page(data);
}

}  // namespace emend::evaluation
