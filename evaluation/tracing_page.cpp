// Causal traces as a page for people.
#include <emend/evaluation/detail/html.h>
#include <emend/evaluation/detail/page.h>
#include <emend/evaluation/tracing.h>

#include <algorithm>

namespace emend::evaluation {
namespace {

constexpr TraceKind kKinds[] = {TraceKind::kState, TraceKind::kMlp, TraceKind::kAttention};

/// In a page an SVG needs no name space, and takes the width of its card.
std::string inlined(std::string svg) {
  const std::string name = " xmlns=\"http://www.w3.org/2000/svg\"";
  if (const size_t at = svg.find(name); at != std::string::npos) svg.erase(at, name.size());
  return svg;
}

std::string card(const std::string& title, const std::string& inside) {
  return "<div class=\"card\"><h3>" + detail::escape(title) + "</h3>" + inside + "</div>";
}

std::string heading(const TraceSummary& summary, const std::string& model_name) {
  const auto tile = [](const char* name, const std::string& value, const std::string& note) {
    return "<div class=\"tile\"><span class=\"soft small\">" + std::string(name) + "</span><b>" + value +
           "</b><span class=\"soft small\">" + detail::escape(note) + "</span></div>";
  };
  return "<header><h1>Where " + detail::escape(model_name) +
         " keeps its facts</h1><p>The subject of each prompt is noised until the model loses the answer. Then one part "
         "of the clean run is put back, and the answer comes back as far as that part carries it.</p>"
         "<div class=\"tiles\">" +
         tile("facts traced", std::to_string(summary.facts),
              std::to_string(summary.skipped) + " more are not known to the model") +
         tile("p(answer), clean", detail::fixed(summary.clean, 3), "mean over facts") +
         tile("p(answer), noised", detail::fixed(summary.corrupted, 3),
              "noise " + detail::significant(summary.noise) + ", up to " + std::to_string(summary.samples) + " draws") +
         "</div></header>";
}

}  // namespace

std::string trace_page(const TraceSummary& summary, const std::string& model_name, size_t facts) {
  std::string body = heading(summary, model_name);
  const auto traced_mlp = summary.effect.count(TraceKind::kMlp) > 0;
  if (traced_mlp && summary.facts > 0) {
    const auto suggestion = suggest_layers(summary);
    std::string layers, why;
    for (const auto& layer : suggestion["layers"]) layers += (layers.empty() ? "" : ", ") + layer.dump();
    for (const auto& line : suggestion["why"]) why += "<p>" + detail::escape(line.get<std::string>()) + "</p>";
    body += "<section><h2>Layers to edit</h2><div class=\"card\"><h3>" + layers + "</h3>" + why + "</div></section>";
  }
  std::string averages;
  for (TraceKind kind : kKinds)
    if (const auto svg = summary_svg(summary, kind); !svg.empty())
      averages += card(std::string(to_string(kind)), inlined(svg));
  body +=
      "<section><h2>Average indirect effect</h2><p class=\"soft\">Probability of the answer that comes back; "
      "darker is more.</p><div class=\"charts\">" +
      averages + "</div></section>";
  std::string single;
  for (size_t i = 0; i < std::min(facts, summary.traces.size()); ++i) {
    const FactTrace& trace = summary.traces[i];
    std::string maps;
    for (TraceKind kind : kKinds)
      if (trace.restored.count(kind)) maps += card(std::string(to_string(kind)), inlined(trace_svg(trace, kind)));
    single += "<details" + std::string(i == 0 ? " open" : "") + "><summary>" + detail::escape(trace.fact.prompt) +
              " → " + detail::escape(trace.answer_text) + " (" + detail::fixed(trace.clean, 3) + " clean, " +
              detail::fixed(trace.corrupted, 3) + " noised)</summary><div class=\"charts\">" + maps +
              "</div></details>";
  }
  if (!single.empty())
    body +=
        "<section><h2>Fact by fact</h2><p class=\"soft\">Tokens downwards, the subject's with a star; layers to the "
        "right.</p>" +
        single + "</section>";
  if (summary.traces.size() > facts)
    body += "<p class=\"soft small\">" + std::to_string(summary.traces.size() - facts) + " more in trace.json.</p>";
  return detail::html_page("emend: causal tracing", body);
}

}  // namespace emend::evaluation
