// Facts as rows of a file, in the forms that rows.cpp reads.
#include <emend/datasets/detail/reader.h>
#include <emend/datasets/detail/rows.h>

namespace emend::datasets::detail {

void write_prompt_lists(const Fact& fact, nlohmann::ordered_json& row) {
  for (const auto& list : kPromptLists)
    if (list.member != &Fact::distracting_prompts || !fact.distracting_prompts.empty())
      row[list.key] = fact.*list.member;
}

void write_one_hop(const Fact& fact, nlohmann::ordered_json& row) {
  const auto hop = fact.portability.find("one_hop");
  if (hop == fact.portability.end()) return;
  const Probe& probe = hop->second.front();
  row["portability"] = {{"Recalled Relation", fact.extra.value("recalled_relation", nlohmann::ordered_json(""))},
                        {"New Question", probe.prompt},
                        {"New Answer", write_answers(probe.answers)}};
}

nlohmann::ordered_json write_answers(const std::vector<std::string>& answers) {
  return answers.size() == 1 ? nlohmann::ordered_json(answers.front()) : nlohmann::ordered_json(answers);
}

nlohmann::ordered_json write_probes(const std::map<std::string, std::vector<Probe>>& probes, const char* answers) {
  nlohmann::ordered_json groups = nlohmann::ordered_json::object();
  for (const auto& [name, list] : probes)
    for (const Probe& probe : list) groups[name].push_back({{"prompt", probe.prompt}, {answers, probe.answers}});
  return groups;
}

void write_extra(const Fact& fact, nlohmann::ordered_json& row) {
  for (const auto& [key, value] : fact.extra.items())
    if (!row.contains(key)) row[key] = value;
}

std::string write_prompt(const Fact& fact) {
  const std::string full = fact.full_prompt();
  return count_of(full, fact.subject) == 1 && count_of(full, "{}") == 0 ? full : fact.prompt;
}

}  // namespace emend::datasets::detail
