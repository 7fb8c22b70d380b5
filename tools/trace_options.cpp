#include "trace_options.h"

#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/datasets/fact.h>
#include <emend/datasets/known.h>

namespace emend::tools {
namespace {

using datasets::KnownFact;

bool multiplies_bfloat16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

std::vector<KnownFact> from_facts(const datasets::FactSet& facts, const std::string& name) {
  std::vector<KnownFact> known;
  for (const auto& fact : facts.facts) {
    if (!fact.target_true) continue;
    KnownFact one;
    one.known_id = fact.case_id;
    one.subject = fact.subject;
    one.attribute = *fact.target_true;
    one.prompt = fact.full_prompt();
    one.prompt_template = fact.prompt;
    one.relation_id = fact.relation_id;
    one.line = fact.line;
    known.push_back(std::move(one));
  }
  if (known.empty())
    throw Error(ErrorClass::kInvalidArgument, {name, "no fact says what the model is believed to know",
                                               "rows with \"attribute\" (known facts) or \"target_true\"",
                                               "give known facts, or --prompt and --subject"});
  return known;
}

}  // namespace

void add_trace_options(CLI::App& command, TraceSettings& settings) {
  settings.model.dtype = "auto";
  add_model_options(command, settings.model);
  const char *facts = "Facts", *trace = "Tracing";
  command
      .add_option("--facts", settings.facts,
                  "known facts (rows with subject, prompt, attribute) or any facts with an old answer; default: the "
                  "facts that come with emend")
      ->group(facts)
      ->type_name("FILE");
  command.add_option("--limit", settings.trace.max_facts, "facts to trace, of those the model knows; -1: all")
      ->group(facts);
  command.add_option("--samples", settings.trace.samples, "noise draws at most")
      ->group(trace)
      ->check(CLI::Range(1, 10000));
  command
      .add_option("--precision", settings.trace.precision,
                  "a state gets no more draws once its standard error is below; 0: always all")
      ->group(trace)
      ->check(CLI::NonNegativeNumber);
  command.add_option("--window", settings.trace.window, "layers restored together for MLP and attention")
      ->group(trace)
      ->check(CLI::Range(1, 10000));
  command
      .add_option("--noise", settings.trace.noise_multiple, "noise in standard deviations of the subjects' embeddings")
      ->group(trace)
      ->check(CLI::PositiveNumber);
  command.add_option("--batch-tokens", settings.trace.batch_tokens, "tokens of a forward pass")
      ->group(trace)
      ->check(CLI::PositiveNumber);
  command.add_option("--seed", settings.trace.seed, "random seed")->group(trace);
}

std::vector<KnownFact> load_traceable(const TraceSettings& settings, const Common& common) {
  if (settings.prompt.empty() != settings.subject.empty())
    throw Error(ErrorClass::kInvalidArgument, {settings.prompt.empty() ? "--subject" : "--prompt", "given alone",
                                               "--prompt with --subject", "give both, or --facts"});
  if (!settings.prompt.empty()) {
    KnownFact one;
    one.subject = settings.subject;
    one.prompt = settings.prompt;
    if (const size_t slot = one.prompt.find("{}"); slot != std::string::npos) one.prompt.replace(slot, 2, one.subject);
    return {one};
  }
  if (settings.facts.empty()) return from_facts(datasets::load_bundled_facts({}, common.log), "emend's own facts");
  const auto text = read_file(settings.facts);
  const bool known_form = text.substr(0, 65536).find("\"attribute\"") != std::string::npos;
  auto facts = known_form ? datasets::parse_known_facts(text, settings.facts)
                          : from_facts(datasets::load_facts(settings.facts, {}, common.log), settings.facts);
  common.log.info("facts.loaded", std::to_string(facts.size()) + " known facts from " + settings.facts);
  return facts;
}

void resolve_trace_dtype(ModelOptions& model, const Common& common) {
  if (model.dtype != "auto") return;
  model.dtype = multiplies_bfloat16() ? "bfloat16" : "float32";
  common.log.info("trace.dtype", "tracing in " + model.dtype + "; --dtype float32 is exact and slower");
}

}  // namespace emend::tools
