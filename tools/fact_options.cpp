#include "fact_options.h"

#include <emend/core/error.h>

#include <cmath>
#include <cstdio>
#include <sstream>

namespace emend::tools {

void add_fact_options(CLI::App& command, FactOptions& options, bool required) {
  const char* group = "Facts";
  auto* facts = command.add_option("--facts", options.file, "file of facts (JSON array or JSON lines)")
                    ->group(group)
                    ->type_name("FILE");
  if (required) facts->required();
  std::string formats = "auto";
  for (const auto& format : datasets::fact_formats()) formats += ", " + format.name;
  command.add_option("--format", options.read.format, "facts file format: " + formats)->group(group)->type_name("NAME");
  command.add_option("--limit", options.read.limit, "facts to read; -1: all")->group(group);
  command.add_option("--offset", options.read.offset, "facts to leave out at the start")
      ->group(group)
      ->check(CLI::NonNegativeNumber);
  command
      .add_option("--zsre-target", options.read.zsre_target,
                  "target of zsRE rows: answers (the true answer) or alt (the counterfactual)")
      ->group(group)
      ->check(CLI::IsMember({"answers", "alt"}));
}

void add_metric_options(CLI::App& command, MetricOptions& options) {
  const char* group = "Evaluation";
  std::string names = "auto, none";
  for (const auto& family : evaluation::metric_families()) names += ", " + family.name;
  command.add_option("--eval", options.names, "metrics: " + names)->group(group)->delimiter(',')->type_name("LIST");
  command.add_flag("--generation", options.generation, "also fluency and consistency of generated text (slow)")
      ->group(group);
  command.add_option("--snippets", options.snippets, "attribute snippets for the reference score")
      ->group(group)
      ->type_name("FILE");
  command.add_option("--idf-corpus", options.idf_corpus, "texts for inverse document frequencies")
      ->group(group)
      ->type_name("FILE");
  command
      .add_option("--health-data", options.health_data,
                  "folder of health_*.json, lambada*.jsonl and text for --eval health")
      ->group(group)
      ->type_name("DIR");
  command.add_option("--health-limit", options.health_limit, "items of each health task; -1: all")->group(group);
  command.add_option("--eval-batch-tokens", options.batch_tokens, "tokens per forward pass of the evaluation")
      ->group(group)
      ->check(CLI::PositiveNumber);
  command
      .add_option("--eval-engine", options.engine,
                  "fast, or reference: the published loop, a padded batch a case (the same numbers, slow)")
      ->group(group)
      ->check(CLI::IsMember({"fast", "reference"}));
  command.add_option("--cache", options.cache, "folder of cached evaluations of unedited models")
      ->group(group)
      ->type_name("DIR");
}

namespace {

// A row that is not a fact makes the data unusable (exit status 3), unlike an option that is wrong (2).
datasets::FactSet load_or_blame_file(const FactOptions& options, const Common& common) {
  try {
    return datasets::load_facts(options.file, options.read, common.log);
  } catch (const Error& error) {
    const bool in_row = std::string(error.what()).starts_with(options.file + ":");
    if (error.error_class() == ErrorClass::kInvalidArgument && in_row)
      throw Error(ErrorClass::kCorruption, error.what());
    throw;
  }
}

}  // namespace

datasets::FactSet load_named_facts(const FactOptions& options, const Common& common) {
  auto facts = load_or_blame_file(options, common);
  if (facts.facts.empty())
    throw Error(ErrorClass::kInvalidArgument, {options.file, "no facts to work on", "at least one usable row",
                                               "check the file, --offset and --limit"});
  common.log.event(
      LogLevel::kInfo, "facts.loaded",
      std::to_string(facts.facts.size()) + " facts from " + options.file + " (" + facts.format + ")",
      {{"file", options.file}, {"format", facts.format}, {"facts", facts.facts.size()}, {"skipped", facts.skipped}});
  return facts;
}

evaluation::EvaluateOptions evaluate_options(const MetricOptions& options, const Common& common, uint64_t seed) {
  evaluation::EvaluateOptions evaluate;
  evaluate.batch_tokens = options.batch_tokens;
  evaluate.reference = options.engine == "reference";
  evaluate.generation = options.generation;
  evaluate.snippets = options.snippets;
  evaluate.idf_corpus = options.idf_corpus;
  evaluate.health_data = options.health_data;
  evaluate.health_limit = options.health_limit;
  evaluate.seed = seed;
  evaluate.progress = common.progress;
  evaluate.cancel = common.cancel;
  evaluate.log = common.log;
  evaluate.sharing = common.sharing;
  return evaluate;
}

namespace {

std::string number(const nlohmann::json& value) {
  if (!value.is_number()) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value.get<double>());
  return text;
}

std::string padded(const std::string& text, size_t width, bool right) {
  const size_t fill = text.size() < width ? width - text.size() : 0;
  return right ? std::string(fill, ' ') + text : text + std::string(fill, ' ');
}

}  // namespace

std::string metrics_table(const std::vector<std::pair<std::string, nlohmann::json>>& states) {
  std::ostringstream out;
  for (const auto& family : evaluation::metric_families()) {
    if (states.empty() || !states[0].second.contains(family.name)) continue;
    const auto& first = states[0].second[family.name];
    out << padded(family.name + (first.contains("n") ? " (n = " + first["n"].dump() + ")" : ""), 36, false);
    for (const auto& [state, summary] : states) out << padded(state, 10, true);
    out << '\n';
    for (const auto& field : family.fields) {
      if (!first.contains(field.key)) continue;
      const std::string label = "  " + field.key + (field.paper_name.empty() ? "" : " [" + field.paper_name + "]");
      out << padded(label, 36, false);
      for (const auto& [state, summary] : states)
        out << padded(number(summary.value(family.name, nlohmann::json::object()).value(field.key, nlohmann::json())),
                      10, true);
      out << "  " << field.unit << '\n';
    }
  }
  return out.str();
}

}  // namespace emend::tools
