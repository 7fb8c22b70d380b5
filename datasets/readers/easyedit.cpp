// EasyEdit's flat rows: prompt (subject filled in), subject, target_new, ground_truth, rephrase_prompt, and locality
// and portability either as one prompt with one answer or as dictionaries of probes.
#include <emend/datasets/detail/reader.h>

#include <algorithm>

namespace emend::datasets::detail {
namespace {

bool is_easyedit(const std::vector<nlohmann::json>& rows) {
  if (!any_has(rows, {"prompt", "subject", "target_new"})) return false;
  return any_has(rows, {"ground_truth"}) || any_has(rows, {"rephrase_prompt"}) || any_has(rows, {"locality_prompt"}) ||
         any_has(rows, {"portability_prompt"});
}

/// locality_prompt with locality_ground_truth, strings or parallel lists.
void read_pair(Fields& fields, const char* prompt_key, const char* answer_key, const char* group,
               std::map<std::string, std::vector<Probe>>& into) {
  const nlohmann::json& prompts = fields.raw(prompt_key);
  const nlohmann::json& answers = fields.raw(answer_key);
  if (prompts.is_null()) return;
  std::vector<Probe> probes;
  add_probes(fields, prompts, prompt_key, answers, answer_key, probes);
  if (!probes.empty()) std::ranges::move(probes, std::back_inserter(into[group]));
}

nlohmann::ordered_json write_easyedit(const Fact& fact) {
  nlohmann::ordered_json row;
  row["case_id"] = fact.case_id;
  row["prompt"] = write_prompt(fact);
  row["target_new"] = fact.target_new;
  row["subject"] = fact.subject;
  const auto truth = true_answers(fact);
  if (!truth.empty()) row["ground_truth"] = write_answers(truth);
  if (!fact.paraphrase_prompts.empty()) row["rephrase_prompt"] = write_answers(fact.paraphrase_prompts);
  const auto neighbours = fact.locality.find("neighborhood");
  if (neighbours != fact.locality.end() && neighbours->second.size() == 1) {
    row["locality_prompt"] = neighbours->second.front().prompt;
    row["locality_ground_truth"] = write_answers(neighbours->second.front().answers);
  } else if (neighbours == fact.locality.end() && !fact.neighborhood_prompts.empty() && fact.target_true) {
    row["locality_prompt"] = fact.neighborhood_prompts.front();
    row["locality_ground_truth"] = *fact.target_true;
  }
  auto locality = fact.locality;
  if (row.contains("locality_prompt")) locality.erase("neighborhood");
  if (!locality.empty()) row["locality"] = write_probes(locality);
  if (!fact.portability.empty()) row["portability"] = write_probes(fact.portability);
  if (!fact.relation_id.empty()) row["relation_id"] = fact.relation_id;
  write_extra(fact, row);
  return row;
}

}  // namespace

ParsedRow read_flat(Fields& fields, const ReadOptions&) {
  Fact fact;
  if (auto why = read_core(fields, "prompt", "target_new", fact); !why.empty()) return {.skipped = std::move(why)};
  std::vector<std::string> truth = fields.answers("target_true");
  for (const char* key : {"target_true_aliases", "ground_truth"})
    for (std::string& answer : fields.answers(key))
      if (std::ranges::find(truth, answer) == truth.end()) truth.push_back(std::move(answer));
  set_true_answers(fact, std::move(truth));
  fact.relation_id = fields.text_or("relation_id");
  read_prompt_lists(fields, fact);
  for (const char* key : {"rephrase_prompt", "rephrase_prompts", "rephrase"})
    for (std::string& prompt : fields.texts(key)) fact.paraphrase_prompts.push_back(std::move(prompt));
  fact.locality = read_probes(fields, "locality");
  fact.portability = read_probes(fields, "portability");
  read_pair(fields, "locality_prompt", "locality_ground_truth", "neighborhood", fact.locality);
  read_pair(fields, "portability_prompt", "portability_ground_truth", "portability", fact.portability);
  // A neighbour whose answer is the old answer is what CounterFact calls a neighbourhood prompt.
  if (fields.has("locality_prompt") && fact.neighborhood_prompts.empty() && fact.target_true)
    for (const Probe& probe : fact.locality["neighborhood"])
      if (probe.answers.front() == *fact.target_true) fact.neighborhood_prompts.push_back(probe.prompt);
  if (const auto empty = fact.locality.find("neighborhood"); empty != fact.locality.end() && empty->second.empty())
    fact.locality.erase(empty);
  for (const char* key : {"target_new", "target_true"}) keep_id(fields, key, fact);
  fields.keep({"cond", "target_new_id", "target_true_id"});
  return one_fact(std::move(fact), fields);
}

const FactReader easyedit_reader{
    "easyedit", "EasyEdit's flat rows: prompt, subject, target_new, ground_truth, rephrase_prompt, locality_prompt, …",
    is_easyedit, read_flat, write_easyedit};

}  // namespace emend::datasets::detail
