#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/datasets/known.h>
#include <emend/evaluation/tracing.h>

#include <iostream>

#include "../model_options.h"
#include "../run_directory.h"

namespace emend::tools {
namespace {

struct Options {
  ModelOptions model;
  std::string facts, out;
  evaluation::TraceOptions trace;
};

void print_summary(const evaluation::TraceSummary& summary) {
  std::cout << "facts traced " << summary.facts << " (not known to the model: " << summary.skipped << "), answer's probability "
            << summary.clean << " clean, " << summary.corrupted << " corrupted\n";
  for (const auto& [kind, effect] : summary.effect) {
    std::cout << "indirect effect of " << evaluation::to_string(kind) << " (layer with the largest, and its value)\n";
    for (size_t row = 0; row < effect.size(); ++row) {
      const auto best = std::max_element(effect[row].begin(), effect[row].end());
      if (best == effect[row].end()) continue;
      std::cout << "  " << summary.rows[row] << ": layer " << best - effect[row].begin() << ", " << *best << '\n';
    }
  }
}

}  // namespace

VerbRun setup_trace(CLI::App& command) {
  auto options = std::make_shared<Options>();
  options->trace.max_facts = 50;
  add_model_options(command, options->model);
  command.add_option("--facts", options->facts, "known facts: rows with subject, prompt and attribute")->required()->type_name("FILE");
  command.add_option("--out", options->out, "folder for trace.json and the heat maps")->type_name("DIR");
  command.add_option("--limit", options->trace.max_facts, "facts to trace (those the model knows); -1: all");
  command.add_option("--samples", options->trace.samples, "noise draws a fact")->check(CLI::PositiveNumber);
  command.add_option("--window", options->trace.window, "layers restored together for MLP and attention")->check(CLI::PositiveNumber);
  command.add_option("--noise", options->trace.noise_multiple, "noise in standard deviations of the subjects' embeddings");
  command.add_option("--seed", options->trace.seed, "random seed");
  return [options](Common& common) {
    const auto model = load_named(options->model, common);
    const auto facts = datasets::load_known_facts(options->facts);
    auto trace = options->trace;
    trace.progress = common.progress;
    trace.cancel = common.cancel;
    const auto summary = evaluation::trace_facts(model, facts, trace);
    nlohmann::ordered_json document = evaluation::to_json(summary);
    document["suggested"] = evaluation::suggest_layers(summary);
    if (!options->out.empty()) {
      const RunDirectory folder(options->out, true);
      folder.write_json("trace.json", document);
      for (const auto kind : trace.kinds)
        write_file(folder / ("trace_" + std::string(evaluation::to_string(kind)) + ".svg"), evaluation::summary_svg(summary, kind));
      common.log.info("trace.written", "heat maps in " + folder.path().string());
    }
    if (common.json) {
      std::cout << dump_json(document) << '\n';
    } else {
      print_summary(summary);
      std::cout << "suggested layers " << document["suggested"].dump() << '\n';
    }
    return 0;
  };
}

}  // namespace emend::tools
