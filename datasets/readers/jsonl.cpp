// The short form, {"prompt": "{} is in the city of", "subject": "The Eiffel Tower", "target_new": "Rome"}, with any of
// the lists and probes of the other formats beside it: the form that holds everything a Fact has.
#include <emend/datasets/detail/reader.h>

namespace emend::datasets::detail {
namespace {

bool is_jsonl(const std::vector<nlohmann::json>& rows) {
  return any_has(rows, {"prompt", "subject", "target_new"});
}

nlohmann::ordered_json write_jsonl(const Fact& fact) {
  nlohmann::ordered_json row = {
      {"case_id", fact.case_id}, {"prompt", fact.prompt}, {"subject", fact.subject}, {"target_new", fact.target_new}};
  const auto truth = true_answers(fact);
  if (!truth.empty()) row["target_true"] = write_answers(truth);
  if (!fact.relation_id.empty()) row["relation_id"] = fact.relation_id;
  nlohmann::ordered_json lists;
  write_prompt_lists(fact, lists);
  for (const auto& [key, list] : lists.items())
    if (!list.empty()) row[key] = list;
  if (!fact.locality.empty()) row["locality"] = write_probes(fact.locality);
  if (!fact.portability.empty()) row["portability"] = write_probes(fact.portability);
  write_extra(fact, row);
  return row;
}

}  // namespace

const FactReader jsonl_reader{"jsonl", "the short form: prompt, subject, target_new; everything else optional",
                              is_jsonl, read_flat, write_jsonl};

}  // namespace emend::datasets::detail
