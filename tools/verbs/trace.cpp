// trace: which hidden states carry a model's facts.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>

#include "../run_directory.h"
#include "../trace_options.h"

namespace emend::tools {
namespace {

using evaluation::TraceKind;

constexpr const char* kExamples = R"(Examples:
  emend trace --limit 20 --out runs/trace                         20 of emend's facts on the default model
  emend trace --facts known_1000.json --limit 50 --out runs/trace as the ROME paper does
  emend trace --prompt "The Eiffel Tower is in" --subject "The Eiffel Tower" --out runs/eiffel
  emend trace --facts known_1000.json --kinds mlp --dtype float32 --precision 0 --json

With --out, the folder gets trace.json, trace.html and one SVG file for each kind. --dtype auto is bfloat16 where the
processor multiplies it, else float32: averages differ by less than the noise does.)";

struct Options {
  TraceSettings settings;
  std::vector<std::string> kinds = {"state", "mlp", "attention"};
  std::string out;
};

std::vector<TraceKind> parse_kinds(const std::vector<std::string>& names) {
  std::vector<TraceKind> kinds;
  for (const auto& name : names)
    for (TraceKind kind : {TraceKind::kState, TraceKind::kMlp, TraceKind::kAttention})
      if (name == evaluation::to_string(kind) && std::find(kinds.begin(), kinds.end(), kind) == kinds.end())
        kinds.push_back(kind);
  return kinds;
}

void print_summary(const evaluation::TraceSummary& summary, double seconds) {
  char line[256];
  std::snprintf(line, sizeof line,
                "%lld facts traced in %.1f s, %lld more are not known to the model\n"
                "probability of the answer: %.3f clean, %.3f with a noised subject\n",
                static_cast<long long>(summary.facts), seconds, static_cast<long long>(summary.skipped), summary.clean,
                summary.corrupted);
  std::cout << line;
  if (summary.facts == 0) return;
  for (const auto& [kind, effect] : summary.effect) {
    std::cout << "\n"
              << (kind == TraceKind::kState
                      ? "restoring single states"
                      : std::string("restoring ") + (kind == TraceKind::kMlp ? "MLP" : "attention") + " outputs of " +
                            std::to_string(summary.window) + " layers")
              << ": layer with the largest effect\n";
    for (size_t row = 0; row < effect.size(); ++row) {
      const auto best = std::max_element(effect[row].begin(), effect[row].end());
      std::snprintf(line, sizeof line, "  %-24s %4lld  %+.3f\n", summary.rows[row].c_str(),
                    static_cast<long long>(best - effect[row].begin()), *best);
      if (*best == *best) std::cout << line;
    }
  }
}

void write_files(const RunDirectory& folder, const evaluation::TraceSummary& summary,
                 const nlohmann::ordered_json& document, const std::string& model_name) {
  folder.write_json("trace.json", document);
  write_file(folder / "trace.html", evaluation::trace_page(summary, model_name));
  for (const auto& [kind, effect] : summary.effect)
    write_file(folder / ("trace_" + std::string(evaluation::to_string(kind)) + ".svg"),
               evaluation::summary_svg(summary, kind));
}

}  // namespace

VerbRun setup_trace(CLI::App& command) {
  auto options = std::make_shared<Options>();
  options->settings.trace.max_facts = 50;
  add_trace_options(command, options->settings);
  command
      .add_option("--prompt", options->settings.prompt,
                  "trace one prompt, whatever the model answers; {} stands for the subject")
      ->group("Facts")
      ->type_name("TEXT");
  command.add_option("--subject", options->settings.subject, "its subject")->group("Facts")->type_name("TEXT");
  command.add_option("--kinds", options->kinds, "what to restore: state, mlp, attention")
      ->group("Tracing")
      ->delimiter(',')
      ->check(CLI::IsMember({"state", "mlp", "attention"}));
  command.add_option("--out", options->out, "folder for trace.json, trace.html and the heat maps")->type_name("DIR");
  command.footer(kExamples);
  return [options](Common& common) {
    auto settings = options->settings;
    const auto facts = load_traceable(settings, common);
    std::optional<RunDirectory> folder;
    if (!options->out.empty()) folder.emplace(options->out, true);
    resolve_trace_dtype(settings.model, common);
    const auto model = load_named(settings.model, common);
    settings.trace.kinds = parse_kinds(options->kinds);
    settings.trace.any_answer = !settings.prompt.empty();
    settings.trace.progress = common.progress;
    settings.trace.cancel = common.cancel;
    const auto begin = std::chrono::steady_clock::now();
    const auto summary = evaluation::trace_facts(model, facts, settings.trace);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    nlohmann::ordered_json document = evaluation::to_json(summary);
    document["model"] = model.checkpoint().path().string();
    document["dtype"] = settings.model.dtype;
    document["seed"] = settings.trace.seed;
    document["seconds"] = seconds;
    const bool suggests = summary.facts > 0 && summary.effect.count(TraceKind::kMlp) > 0;
    if (suggests) document["suggested"] = evaluation::suggest_layers(summary);
    if (folder) write_files(*folder, summary, document, model.checkpoint().path().filename().string());
    if (common.json) {
      std::cout << dump_json(document) << '\n';
      return 0;
    }
    print_summary(summary, seconds);
    if (suggests) std::cout << "\nlayers to edit: " << document["suggested"]["layers"].dump() << '\n';
    if (folder) std::cout << "\nheat maps: " << (*folder / "trace.html").string() << '\n';
    return 0;
  };
}

}  // namespace emend::tools
