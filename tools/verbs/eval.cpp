#include "../fact_options.h"
#include "../packs.h"

namespace emend::tools {
namespace {

struct EvalArguments {
  ModelOptions model;
  FactOptions facts;
  MetricOptions metrics;
  std::vector<std::string> packs;
  uint64_t seed = 0;
};

// Both states of the model where packs are given; all processes of a group share the scoring.
int evaluate_named(const EvalArguments& options, Common& common) {
  const auto facts = workflow::load_named_facts(options.facts, common);
  const auto names = evaluation::resolve_metrics(options.metrics.names, facts);
  auto model = load_named(options.model, common);
  auto evaluate = workflow::evaluate_options(model, options.metrics, common, options.seed);
  workflow::Packs packs(model);
  (void)workflow::Packs::load(model, options.packs);  // what is wrong with one is known before anything is measured
  // What lies beside the weights is not in the model's fingerprint: such a state is not kept.
  const auto before = packs.runtime().empty()
                          ? workflow::evaluate_unedited(model, facts, names, options.metrics, common, options.seed)
                          : evaluation::evaluate(model, packs.runtime().with_prefixes(facts), names, evaluate);
  std::vector<std::pair<std::string, nlohmann::json>> states = {{"before", before.summary}};
  nlohmann::ordered_json document = {
      {"facts", facts.facts.size()}, {"format", facts.format}, {"metrics", before.summary}};
  if (!options.packs.empty()) {
    packs.add(model, options.packs);
    evaluate.before = &before;
    const auto after = evaluation::evaluate(model, packs.runtime().with_prefixes(facts), names, evaluate);
    states.emplace_back("after", after.summary);
    document["metrics"] = {{"pre", before.summary}, {"post", after.summary}};
  }
  if (common.sharing.first()) common.print(document, metrics_table(states));
  return 0;
}

}  // namespace

VerbRun setup_eval(Options& o) {
  auto& options = o.arguments<EvalArguments>();
  add_model_options(o, options.model);
  add_fact_options(o, options.facts, true);
  add_metric_options(o, options.metrics);
  add_pack_option(o, options.packs, "apply this edit pack first and show both states (repeatable)");
  o.group("Evaluation").add("--seed", &options.seed, "random seed");
  o.footer =
      "Examples:\n"
      "  emend eval --facts facts.json\n"
      "  emend eval --model DIR --facts facts.json --pack run/edit.safetensors --json";
  return [&options](Common& common) { return run_together(common, [&] { return evaluate_named(options, common); }); };
}

}  // namespace emend::tools
