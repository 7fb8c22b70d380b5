// Averages of traces by kind of token, layers to edit, and the page that draws them.
#include <emend/core/error.h>
#include <emend/core/text.h>
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
  const auto length = std::ssize(trace.tokens);
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

/// Standard error over facts of the MLP effect at the subject's last token.
double peak_error(const TraceSummary& summary, size_t layer) {
  double sum = 0, squares = 0;
  const auto n = static_cast<double>(summary.traces.size());
  for (const auto& trace : summary.traces) {
    const double effect = trace.restored.at(TraceKind::kMlp)[trace.subject_end - 1][layer] - trace.corrupted;
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
        n[row] += 1;
        for (size_t l = 0; l < layers; ++l) own[row][l] += restored[t][l] - trace.corrupted;
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
    json one = {{"known_id", trace.fact.case_id},
                {"prompt", trace.fact.full_prompt()},
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
    refuse({"suggested layers", "no traces of MLP outputs", "at least one traced fact with kind mlp",
            "trace facts that the model knows"});
  const auto& effect = found->second[kLastSubject];
  // The first MLP works on the embedding that was noised: windows that hold it bring back the token, not the fact.
  auto first = effect.begin() + std::min<std::ptrdiff_t>(summary.window / 2 + 1, std::ssize(effect));
  if (first == effect.end()) first = effect.begin();
  const auto peak = std::max_element(first, effect.end()) - effect.begin();
  const double best = effect[peak], error = peak_error(summary, static_cast<size_t>(peak));
  // The published choice: layers up to and including the peak, which the causal path from the subject to the answer
  // passes.
  const auto n = static_cast<std::ptrdiff_t>(effect.size());
  const auto last = std::clamp<std::ptrdiff_t>(peak, std::min<std::ptrdiff_t>(count, n) - 1, n - 1);
  json layers = json::array(), why = json::array();
  for (std::ptrdiff_t l = std::max<std::ptrdiff_t>(0, last - count + 1); l <= last; ++l) layers.push_back(l);
  std::string alike;  // within one standard error of the peak
  for (auto layer = first; layer != effect.end(); ++layer)
    if (*layer >= best - error) append_item(alike, std::to_string(layer - effect.begin()));
  const double taken = summary.clean - summary.corrupted;
  const std::string share = taken > 0 ? ", " + whole_percent(best / taken) + " of what noise on the subject took" : "";
  why.push_back("Restoring MLP outputs around layer " + std::to_string(peak) + " at the subject's last token " +
                (best > 0 ? "has the largest effect: " : "brings nothing back, nor does any other layer: ") +
                detail::fixed(best, 3) + (error > 0 ? " ± " + detail::fixed(error, 3) : "") + " of probability" +
                (best > 0 ? share : "") + " (" + detail::fixed(summary.clean, 3) + " without noise, " +
                detail::fixed(summary.corrupted, 3) + " with it; " +
                counted(static_cast<size_t>(summary.facts), "fact") + ").");
  if (summary.facts > 1) why.push_back("Within one standard error of that peak: layer " + alike + ".");
  if (first != effect.begin())
    why.push_back("Windows that hold the first layer's MLP (up to layer " + std::to_string(first - effect.begin() - 1) +
                  ", effect " + detail::fixed(*std::max_element(effect.begin(), first), 3) +
                  ") are left out: that MLP reads the noised embedding itself, and restores the token, not the fact.");
  const std::string range = counted(layers.size(), "layer");
  why.push_back(last != peak         ? "The range is the first " + range + ": fewer than asked for end at the peak."
                : layers.size() == 1 ? "The layer is the one at the peak."
                                     : "The range is the " + range +
                                           " that end at the peak, as MEMIT chooses it: each passes on what the next "
                                           "needs.");
  json caveat = best > 0 ? json("") : why[0];
  if (summary.facts < 10 || best < 2 * error) {
    why.push_back("Few facts, or a peak less than two standard errors above nothing: trace more before relying on it.");
    if (best > 0) caveat = why.back();
  }
  return {{"peak", peak},           {"layers", layers}, {"effect", best},  {"standard_error", error},
          {"facts", summary.facts}, {"why", why},       {"caveat", caveat}};
}

std::string trace_page(const TraceSummary& summary, const std::string& model_name) {
  constexpr size_t kFacts = 20;
  json data = to_json(summary);
  data["page"] = "trace";
  data["model"] = model_name;
  auto& traces = data["traces"].get_ref<json::array_t&>();
  data["more"] = traces.size() - std::min(traces.size(), kFacts);
  traces.resize(std::min(traces.size(), kFacts));
  if (summary.effect.count(TraceKind::kMlp) && summary.facts > 0) data["suggested"] = suggest_layers(summary);
  return detail::fill_page(data);
}

}  // namespace emend::evaluation
