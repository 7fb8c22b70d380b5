#include <emend/core/error.h>
#include <emend/editors/pack.h>

#include <iostream>

#include "../fact_options.h"
#include "../model_options.h"
#include "../run_directory.h"

namespace emend::tools {
namespace {

struct Options {
  ModelOptions model;
  FactOptions facts;
  MetricOptions metrics;
  std::vector<std::string> packs;
  uint64_t seed = 0;
};

}  // namespace

VerbRun setup_eval(CLI::App& command) {
  auto options = std::make_shared<Options>();
  add_model_options(command, options->model);
  add_fact_options(command, options->facts, true);
  add_metric_options(command, options->metrics);
  command.add_option("--pack", options->packs, "apply this edit pack first and show both states (repeatable)")
      ->group("Model")
      ->type_name("FILE");
  command.add_option("--seed", options->seed, "random seed")->group("Evaluation");
  return [options](Common& common) {
    const auto facts = load_named_facts(options->facts, common);
    auto model = load_named(options->model, common);
    auto evaluate = evaluate_options(options->metrics, common, options->seed);
    const auto names = evaluation::resolve_metrics(options->metrics.names, facts);
    const auto before = evaluation::evaluate_before(model, facts, names, evaluate, options->metrics.cache);
    std::vector<std::pair<std::string, nlohmann::json>> states = {{"before", before.summary}};
    nlohmann::ordered_json document = {
        {"facts", facts.facts.size()}, {"format", facts.format}, {"metrics", before.summary}};
    if (!options->packs.empty()) {
      for (const auto& path : options->packs) editors::apply_pack(model, editors::load_pack(path))->commit();
      evaluate.before = &before;
      const auto after = evaluation::evaluate(model, facts, names, evaluate);
      states.emplace_back("after", after.summary);
      document["metrics"] = {{"pre", before.summary}, {"post", after.summary}};
    }
    std::cout << (common.json ? dump_json(document) + "\n" : metrics_table(states));
    return 0;
  };
}

}  // namespace emend::tools
