#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/workflow/lifelong.h>

#include <algorithm>

namespace emend::workflow {
namespace {

using nlohmann::json;

// At most `limit` (-1: all) of the first `edits` facts, spread evenly.
datasets::FactSet spread(const datasets::FactSet& asked, size_t edits, int64_t limit) {
  datasets::FactSet chosen;
  chosen.format = asked.format;
  const size_t count = limit < 0 ? edits : std::min(edits, static_cast<size_t>(limit));
  for (size_t i = 0; i < count; ++i) chosen.facts.push_back(asked.facts[i * edits / count]);
  return chosen;
}

// The first of `keys` that has a value.
json figure(const nlohmann::json& summary, const char* family, std::initializer_list<const char*> keys) {
  if (const auto own = summary.find(family); own != summary.end())
    for (const char* key : keys)
      if (const auto value = own->find(key); value != own->end() && value->is_number()) return *value;
  return nullptr;
}

struct Column {
  const char *head, *place;
};
constexpr Column kColumns[] = {{"edits", "/edits"},
                               {"first", "/first"},
                               {"last", "/last"},
                               {"all", "/all"},
                               {"paraphrase", "/paraphrase"},
                               {"neighb.", "/neighborhood"},
                               {"says", "/free/edit_begins"},
                               {"says it paraphrased", "/free/paraphrase_begins"},
                               {"LAMBADA", "/health/lambada"},
                               {"perplexity", "/health/wikitext2_perplexity"},
                               {"s so far", "/seconds"}};

std::string cell(const json& entry, const char* place) {
  const auto value = entry.value(json::json_pointer(place), json());
  return value.is_number() ? formatted("%.*f", value.is_number_integer() ? 0 : 1, value.get<double>()) : "-";
}

}  // namespace

json measure_sequence(const models::Model& model, const datasets::FactSet& facts, size_t edits,
                      const at::Tensor& neutral_PV, evaluation::EvaluateOptions options) {
  datasets::FactSet so_far;
  so_far.facts.assign(facts.facts.begin(), facts.facts.begin() + edits);
  if (options.front) so_far = evaluation::asked(std::move(so_far), options.front);
  const auto efficacy = evaluation::evaluate_efficacy(model, so_far.facts,
                                                      {.batch_tokens = options.batch_tokens,
                                                       .progress = options.progress,
                                                       .cancel = options.cancel,
                                                       .sharing = options.sharing});
  const bool compared = std::ranges::any_of(facts.facts, [](const auto& fact) { return fact.target_true.has_value(); });
  const std::span all(efficacy);
  const size_t end = std::min(edits, kEnds);
  json entry = {{"edits", edits}};
  for (const auto& [key, part] :
       {std::pair("first", all.first(end)), std::pair("last", all.last(end)), std::pair("all", all)}) {
    const auto held = evaluation::success_share(part, compared);
    entry[key] = held ? json(100 * held->value) : json();
    entry["counts"][key] = held ? held->n : 0;
  }

  // The sample changes from one measurement to the next, so only neutral text is compared.
  evaluation::Evaluation before;
  before.kept = {{"free.neutral", neutral_PV}, {"health", neutral_PV}};
  const auto sample = spread(facts, edits, options.free_limit);
  options.before = &before;
  options.free_limit = -1;
  options.bootstrap = 0;
  std::vector<std::string> families = {"counterfact", "free"};
  if (!options.health_data.empty()) families.emplace_back("health");
  const auto summary = evaluation::evaluate(model, sample, families, options).summary;
  entry["paraphrase"] = figure(summary, "counterfact", {"paraphrase_success", "paraphrase_accuracy"});
  entry["neighborhood"] = figure(summary, "counterfact", {"neighborhood_success", "neighborhood_accuracy"});
  entry["free"] = summary.value("free", nlohmann::json::object());
  entry["health"] = {{"lambada", figure(summary, "health", {"lambada_accuracy"})},
                     {"wikitext2_perplexity", figure(summary, "health", {"perplexity"})}};
  for (const char* more :
       {"divergence", "mmlu_accuracy", "piqa_accuracy", "sst2_accuracy", "rte_accuracy", "cola_accuracy"})
    if (const auto value = figure(summary, "health", {more}); !value.is_null()) entry["health"][more] = value;
  return entry;
}

std::vector<std::string> lifelong_heads() {
  return mapped(kColumns, [](const auto& column) { return std::string(column.head); });
}

std::vector<std::string> lifelong_cells(const json& entry) {
  return mapped(kColumns, [&](const auto& column) { return cell(entry, column.place); });
}

}  // namespace emend::workflow
