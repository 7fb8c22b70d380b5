#include <emend/core/error.h>

#include <iostream>

#include "../fact_options.h"
#include "../model_options.h"
#include "../packs.h"
#include "../process_group.h"
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

// Both states of the model where packs are given; all processes of a group share the scoring.
int evaluate_named(const Options& options, Common& common) {
  const auto facts = load_named_facts(options.facts, common);
  auto model = load_named(options.model, common);
  auto evaluate = evaluate_options(options.metrics, common, options.seed);
  const auto names = evaluation::resolve_metrics(options.metrics.names, facts);
  Packs packs(model);
  // What lies beside the weights is not in the model's fingerprint: such a state is not kept.
  const auto before = packs.runtime().empty()
                          ? evaluation::evaluate_before(model, facts, names, evaluate,
                                                        std::filesystem::path(options.metrics.cache) / "evaluations")
                          : evaluation::evaluate(model, packs.runtime().with_prefixes(facts), names, evaluate);
  std::vector<std::pair<std::string, nlohmann::json>> states = {{"before", before.summary}};
  nlohmann::ordered_json document = {
      {"facts", facts.facts.size()}, {"format", facts.format}, {"metrics", before.summary}};
  if (!options.packs.empty()) {
    packs.apply(model, options.packs);
    evaluate.before = &before;
    const auto after = evaluation::evaluate(model, packs.runtime().with_prefixes(facts), names, evaluate);
    states.emplace_back("after", after.summary);
    document["metrics"] = {{"pre", before.summary}, {"post", after.summary}};
  }
  if (common.sharing.first()) std::cout << (common.json ? dump_json(document) + "\n" : metrics_table(states));
  return 0;
}

}  // namespace

VerbRun setup_eval(CLI::App& command) {
  auto options = std::make_shared<Options>();
  add_model_options(command, options->model);
  add_fact_options(command, options->facts, true);
  add_metric_options(command, options->metrics);
  add_pack_option(command, options->packs, "apply this edit pack first and show both states (repeatable)");
  command.add_option("--seed", options->seed, "random seed")->group("Evaluation");
  return [options](Common& common) { return run_together(common, [&] { return evaluate_named(*options, common); }); };
}

}  // namespace emend::tools
