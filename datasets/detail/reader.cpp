#include <emend/datasets/detail/reader.h>

#include <algorithm>

namespace emend::datasets::detail {

const std::vector<const FactReader*>& fact_readers() {
  static const std::vector<const FactReader*> readers = {
#define EMEND_FACT_READER(name) &name##_reader(),
#include <emend/datasets/readers.def>
#undef EMEND_FACT_READER
  };
  return readers;
}

bool any_has(const std::vector<nlohmann::json>& rows, std::initializer_list<const char*> keys) {
  return std::any_of(rows.begin(), rows.end(), [&](const nlohmann::json& row) {
    return std::all_of(keys.begin(), keys.end(), [&](const char* key) { return row.contains(key); });
  });
}

bool read_core(Fields& fields, const char* prompt_key, const char* target_key, Fact& fact, ParsedRow& row) {
  fact.case_id = fields.integer_or("case_id", kNoCaseId);
  fact.subject = trim(fields.text("subject"));
  fact.prompt = slot_prompt(fields.text(prompt_key), fact.subject, fields, prompt_key);
  if (!fields.value().contains(target_key)) fields.fail(target_key, "missing", "the new answer, a string");
  if (const auto& target = fields.raw(target_key); target.is_number())
    fields.fail(target_key, kind_of(target), "a string", "write \"" + target.dump() + "\" for that text");
  std::vector<std::string> targets = fields.answers(target_key);
  if (targets.empty()) {
    row.skipped = std::string("\"") + target_key + "\" is blank";
    return false;
  }
  fact.target_new = std::move(targets.front());
  targets.erase(targets.begin());
  if (!targets.empty()) fact.extra["target_new_aliases"] = targets;
  return true;
}

void set_true_answers(Fact& fact, std::vector<std::string> answers) {
  if (answers.empty()) return;
  fact.target_true = std::move(answers.front());
  answers.erase(answers.begin());
  fact.target_true_aliases = std::move(answers);
}

void read_prompt_lists(Fields& fields, Fact& fact) {
  fact.paraphrase_prompts = fields.texts("paraphrase_prompts");
  fact.neighborhood_prompts = fields.texts("neighborhood_prompts");
  fact.attribute_prompts = fields.texts("attribute_prompts");
  fact.generation_prompts = fields.texts("generation_prompts");
  fact.distracting_prompts = fields.texts("distracting_neighborhood_prompts");
}

void write_prompt_lists(const Fact& fact, nlohmann::ordered_json& row) {
  row["paraphrase_prompts"] = fact.paraphrase_prompts;
  row["neighborhood_prompts"] = fact.neighborhood_prompts;
  row["attribute_prompts"] = fact.attribute_prompts;
  row["generation_prompts"] = fact.generation_prompts;
  if (!fact.distracting_prompts.empty()) row["distracting_neighborhood_prompts"] = fact.distracting_prompts;
}

/// One {prompt, ground_truth} object; both may be parallel lists.
static void read_probe_object(const Fields& fields, const nlohmann::json& value, const std::string& name,
                              std::vector<Probe>& probes) {
  if (!value.is_object()) fields.fail(name, kind_of(value), "an object with prompt and ground_truth");
  if (!value.contains("prompt")) fields.fail(name + ".prompt", "missing", "a string");
  const nlohmann::json& prompt = value["prompt"];
  const nlohmann::json& truth = value.contains("ground_truth") ? value["ground_truth"] : nlohmann::json();
  if (prompt.is_string()) {
    Probe probe{prompt.get<std::string>(), fields.answers_of(truth, name + ".ground_truth")};
    if (!blank(probe.prompt) && !probe.answers.empty()) probes.push_back(std::move(probe));
    return;
  }
  if (!prompt.is_array()) fields.fail(name + ".prompt", kind_of(prompt), "a string or a list of strings");
  if (!truth.is_array() || truth.size() != prompt.size())
    fields.fail(name + ".ground_truth", kind_of(truth), "a list as long as prompt", "give one answer for each prompt");
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (!prompt[i].is_string())
      fields.fail(name + ".prompt[" + std::to_string(i) + "]", kind_of(prompt[i]), "a string");
    Probe probe{prompt[i].get<std::string>(),
                fields.answers_of(truth[i], name + ".ground_truth[" + std::to_string(i) + "]")};
    if (!blank(probe.prompt) && !probe.answers.empty()) probes.push_back(std::move(probe));
  }
}

std::map<std::string, std::vector<Probe>> read_probes(Fields& fields, const char* key) {
  std::map<std::string, std::vector<Probe>> result;
  const nlohmann::json& groups = fields.raw(key);
  if (groups.is_null() || (groups.is_array() && groups.empty())) return result;
  if (!groups.is_object()) fields.fail(key, kind_of(groups), "an object of lists of probes");
  for (const auto& [name, group] : groups.items()) {
    std::vector<Probe> probes;
    const std::string path = std::string(key) + "." + name;
    if (group.is_array()) {
      for (size_t i = 0; i < group.size(); ++i)
        read_probe_object(fields, group[i], path + "[" + std::to_string(i) + "]", probes);
    } else if (!group.is_null()) {
      read_probe_object(fields, group, path, probes);
    }
    if (!probes.empty()) result[name] = std::move(probes);
  }
  return result;
}

void read_one_hop(Fields& fields, Fact& fact) {
  if (!fields.has("portability")) return;
  Fields hop = fields.object("portability");
  const std::string question = hop.text_or("New Question");
  std::vector<std::string> answers = hop.answers("New Answer");
  if (!blank(question) && !answers.empty()) fact.portability["one_hop"].push_back({question, std::move(answers)});
  if (hop.has("Recalled Relation")) fact.extra["recalled_relation"] = hop.text_or("Recalled Relation");
  const nlohmann::json rest = hop.rest();
  for (const auto& [key, value] : rest.items()) fact.extra["portability." + key] = value;
}

nlohmann::ordered_json write_answers(const std::vector<std::string>& answers) {
  return answers.size() == 1 ? nlohmann::ordered_json(answers.front()) : nlohmann::ordered_json(answers);
}

nlohmann::ordered_json write_probes(const std::map<std::string, std::vector<Probe>>& probes) {
  nlohmann::ordered_json groups = nlohmann::ordered_json::object();
  for (const auto& [name, list] : probes)
    for (const Probe& probe : list) groups[name].push_back({{"prompt", probe.prompt}, {"ground_truth", probe.answers}});
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

void each_text(const Fact& fact, const std::function<void(const char* what, const std::string& text)>& look) {
  look("the prompt", fact.prompt);
  look("the subject", fact.subject);
  look("target_new", fact.target_new);
  if (fact.target_true) look("target_true", *fact.target_true);
  const auto list = [&](const char* what, const std::vector<std::string>& texts) {
    for (const std::string& text : texts) look(what, text);
  };
  list("an alias of target_true", fact.target_true_aliases);
  list("a paraphrase", fact.paraphrase_prompts);
  list("a neighbourhood prompt", fact.neighborhood_prompts);
  list("an attribute prompt", fact.attribute_prompts);
  list("a generation prompt", fact.generation_prompts);
  list("a distracting prompt", fact.distracting_prompts);
  for (const auto* probes : {&fact.locality, &fact.portability})
    for (const auto& [name, group] : *probes)
      for (const Probe& probe : group) {
        look("a probe", probe.prompt);
        list("the answer of a probe", probe.answers);
      }
}

}  // namespace emend::datasets::detail
