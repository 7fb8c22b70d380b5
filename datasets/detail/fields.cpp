// Typed access to the keys of a row, and the pieces of rows that several formats share.
#include <emend/core/error.h>
#include <emend/core/utf8.h>
#include <emend/datasets/detail/reader.h>
#include <emend/datasets/detail/rows.h>

#include <algorithm>
#include <cmath>

namespace emend::datasets::detail {

void Fields::fail(const std::string& key, const std::string& got, const std::string& expected,
                  const std::string& advice) const {
  throw Error(ErrorClass::kCorruption, {where_, "field \"" + path_ + key + "\" is " + got, expected, advice});
}

void Fields::lacks(const std::string& key, const std::string& expected) const {
  std::string close;
  for (const auto& [name, value] : object_.items())
    if (close.empty() && !key_meant_by(name, {key}).empty()) close = name;
  fail(key, "missing", expected, close.empty() ? "" : "rename \"" + shorten(close, 40) + "\"");
}

const nlohmann::json& Fields::raw(const char* key) {
  static const nlohmann::json kNull;
  read_.insert(key);
  if (broken_ && broken_->contains(key))
    fail(key, "broken JSON (" + broken_->at(key) + ")", "JSON in a cell that begins with [ or {",
         "correct it; text that begins so is written as [\"…\"]");
  const auto found = object_.find(key);
  return found == object_.end() ? kNull : *found;
}

std::string Fields::text(const char* key) {
  const nlohmann::json& value = raw(key);
  if (value.is_null() && !object_.contains(key)) lacks(key, "a string");
  if (!value.is_string()) fail(key, kind_of(value), "a string");
  if (says_nothing(value.get_ref<const std::string&>())) fail(key, "blank", "a string with text in it");
  return value.get<std::string>();
}

std::string Fields::text_or(const char* key, std::string fallback) {
  const nlohmann::json& value = raw(key);
  if (value.is_null()) return fallback;
  if (!value.is_string()) fail(key, kind_of(value), "a string");
  return value.get<std::string>();
}

int64_t Fields::integer_or(const char* key, int64_t fallback) {
  const nlohmann::json& value = raw(key);
  if (value.is_null()) return fallback;
  if (value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX))
    return value.get<int64_t>();
  if (value.is_number_integer() && !value.is_number_unsigned()) return value.get<int64_t>();
  if (value.is_number_float() && std::floor(value.get<double>()) == value.get<double>() &&
      std::abs(value.get<double>()) < 9e15)
    return static_cast<int64_t>(value.get<double>());
  fail(key, kind_of(value), "a whole number");
}

std::vector<std::string> Fields::texts(const char* key) {
  const nlohmann::json& value = raw(key);
  std::vector<std::string> result;
  if (value.is_null()) return result;
  if (value.is_string()) {
    if (!says_nothing(value.get_ref<const std::string&>())) result.push_back(value.get<std::string>());
    return result;
  }
  if (!value.is_array()) fail(key, kind_of(value), "a list of strings");
  for (size_t i = 0; i < value.size(); ++i) {
    if (!value[i].is_string()) fail(std::string(key) + "[" + std::to_string(i) + "]", kind_of(value[i]), "a string");
    if (!says_nothing(value[i].get_ref<const std::string&>())) result.push_back(value[i].get<std::string>());
  }
  return result;
}

Fields Fields::object(const char* key) {
  const nlohmann::json& value = raw(key);
  if (!object_.contains(key)) lacks(key, "an object");
  return within(value, key);
}

Fields Fields::within(const nlohmann::json& value, const std::string& path) const {
  if (!value.is_object()) fail(path, kind_of(value), "an object");
  return Fields(value, where_, path_ + path + ".", unread_);
}

const nlohmann::json& Fields::list(const char* key) {
  const nlohmann::json& value = raw(key);
  if (!object_.contains(key)) lacks(key, "a list");
  if (!value.is_array()) fail(key, kind_of(value), "a list");
  return value;
}

// Years come as 1969.0 from tables with gaps. Integers beyond 2^53 have lost digits before they are seen here.
std::string Fields::number_text(const nlohmann::json& value, const std::string& name) const {
  if (value.is_number_integer()) return value.dump();
  const double number = value.get<double>();
  if (std::abs(number) >= 0x1p53)
    fail(name, "a number of more digits than are kept", "text", "write it as a string: \"…\"");
  return std::floor(number) == number ? std::to_string(static_cast<int64_t>(number)) : value.dump();
}

std::vector<std::string> Fields::answers_of(const nlohmann::json& value, const std::string& name) const {
  std::vector<std::string> result;
  const auto add = [&](std::string text) {
    if (!text.empty() && std::ranges::find(result, text) == result.end()) result.push_back(std::move(text));
  };
  if (value.is_null()) return result;
  if (value.is_string()) {
    add(trim(value.get_ref<const std::string&>()));
  } else if (value.is_number()) {
    add(number_text(value, name));
  } else if (value.is_object() && value.contains("str")) {
    return answers_of(value["str"], name + ".str");
  } else if (value.is_array()) {
    for (size_t i = 0; i < value.size(); ++i)
      for (std::string& text : answers_of(value[i], name + "[" + std::to_string(i) + "]")) add(std::move(text));
  } else {
    fail(name, kind_of(value), "a string, a list of strings, or a list of lists of aliases");
  }
  return result;
}

std::vector<std::string> Fields::answers(const char* key) {
  return answers_of(raw(key), key);
}

nlohmann::json Fields::rest(bool keeps) const {
  nlohmann::json kept = nlohmann::json::object();
  for (const auto& [key, value] : object_.items())
    if (!read_.contains(key)) kept[key] = value;
  constexpr size_t kMost = 100;
  if (!unread_) return kept;
  for (const auto& [key, value] : kept.items()) {
    if (kept_.contains(key) || unread_->size() == kMost) continue;
    std::string path = path_ + key;
    for (size_t at; (at = path.find('[')) < path_.size();) path.erase(at, path.find(']', at) + 1 - at);
    auto known = std::ranges::find(*unread_, path, &UnreadKey::key);
    if (known == unread_->end()) {
      auto names = read_;
      names.insert(kept_.begin(), kept_.end());
      known = unread_->insert(known, {path, key_meant_by(key, names), where_, 0, keeps});
    }
    ++known->times;
  }
  return kept;
}

std::string key_meant_by(const std::string& key, const std::set<std::string>& keys) {
  const auto bare = [](std::string_view name) {
    std::string only = lower(name);
    std::erase_if(only, [](unsigned char c) { return std::isalnum(c) == 0; });
    return only;
  };
  if (key.size() > 100) return "";
  std::string letters = bare(key);
  for (const auto& name : keys)
    if (bare(name) == letters) return name;
  if (letters.ends_with('s')) letters.pop_back();
  for (const auto& name : keys)  // "paraphrases": paraphrase_prompts
    if (letters.size() > 8 && bare(name).starts_with(letters)) return name;
  const std::string close = key.size() < 4 ? "" : closest_name(key, keys);
  return close.empty() || edit_distance(key, close) > std::max(1, static_cast<int>(key.size()) / 5) ? "" : close;
}

std::string unread_text(const UnreadKey& key) {
  const std::string times = key.times == 1 ? "" : " (" + std::to_string(key.times) + " times, first here)";
  return "the key \"" + shorten(key.key, 60) + "\"" + times + " means nothing in this format" +
         (!key.meant.empty() ? "; did you mean \"" + key.meant + "\"?"
          : key.kept         ? "; it is kept with the fact"
                             : "; it is not kept");
}

std::string slot_prompt(const std::string& prompt, const std::string& subject, const Fields& fields, const char* key) {
  const size_t slots = count_of(prompt, "{}");
  if (slots == 1) return prompt;
  const std::string shown = "\"" + shorten(prompt) + "\"";
  if (slots > 1)
    fields.fail(key, shown + " with " + std::to_string(slots) + " places for the subject", "exactly one {}",
                "write the subject out where it is not to be looked up");
  const size_t found = count_of(prompt, subject);
  if (found == 1) return with_slot(prompt, subject);
  if (found == 0) {
    const bool other_form = count_of(folded(prompt), folded(subject)) == 1;
    fields.fail(key, shown + ", which holds neither {} nor the subject \"" + shorten(subject, 40) + "\"",
                "the subject once in the prompt, or {} in its place",
                other_form
                    ? "the subject is there in other capitals or characters (accents, width, quotes): spell both alike"
                    : "write {} where the subject belongs");
  }
  fields.fail(
      key, shown + ", in which the subject \"" + shorten(subject, 40) + "\" occurs " + std::to_string(found) + " times",
      "the subject once, or {} in its place", "write {} at the occurrence that is to be looked up");
}

const std::vector<const FactReader*>& fact_readers() {
  static const std::vector<const FactReader*> readers = {
#define EMEND_FACT_READER(name) &name##_reader,
#include <emend/datasets/readers.def>
#undef EMEND_FACT_READER
  };
  return readers;
}

bool any_has(const std::vector<nlohmann::json>& rows, std::initializer_list<const char*> keys) {
  return std::ranges::any_of(rows, [&](const nlohmann::json& row) {
    return std::ranges::all_of(keys, [&](const char* key) { return row.contains(key); });
  });
}

std::string read_core(Fields& fields, const char* prompt_key, const char* target_key, Fact& fact) {
  fact.case_id = fields.integer_or("case_id", kNoCaseId);
  fact.subject = trim(fields.text("subject"));
  fact.prompt = slot_prompt(fields.text(prompt_key), fact.subject, fields, prompt_key);
  fields.keep({"target_new_aliases"});
  if (!fields.value().contains(target_key)) fields.lacks(target_key, "the new answer, a string");
  std::vector<std::string> targets = fields.answers(target_key);
  if (targets.empty()) return std::string("\"") + target_key + "\" is blank";
  fact.target_new = std::move(targets.front());
  targets.erase(targets.begin());
  if (!targets.empty()) fact.extra["target_new_aliases"] = targets;
  return "";
}

ParsedRow one_fact(Fact fact, const Fields& fields) {
  fact.extra.update(fields.rest());
  ParsedRow row;
  row.facts.push_back(std::move(fact));
  return row;
}

void keep_id(const Fields& fields, const char* key, Fact& fact) {
  const auto found = fields.value().find(key);
  if (found == fields.value().end() || !found->is_object()) return;
  Fields answer = fields.within(*found, key);
  (void)answer.raw("str");
  if (const auto& id = answer.raw("id"); !id.is_null()) fact.extra[std::string(key) + "_id"] = id;
  const nlohmann::json rest = answer.rest();
  for (const auto& [name, value] : rest.items()) fact.extra[std::string(key) + "." + name] = value;
}

void set_true_answers(Fact& fact, std::vector<std::string> answers) {
  if (answers.empty()) return;
  fact.target_true = std::move(answers.front());
  answers.erase(answers.begin());
  fact.target_true_aliases = std::move(answers);
}

std::vector<std::string> true_answers(const Fact& fact) {
  auto answers = fact.target_true_aliases;
  if (fact.target_true) answers.insert(answers.begin(), *fact.target_true);
  return answers;
}

void read_prompt_lists(Fields& fields, Fact& fact) {
  for (const auto& list : kPromptLists) fact.*list.member = fields.texts(list.key);
}

void add_probes(const Fields& fields, const nlohmann::json& prompts, const std::string& prompts_name,
                const nlohmann::json& answers, const std::string& answers_name, std::vector<Probe>& probes) {
  const auto add = [&](const nlohmann::json& prompt, const nlohmann::json& answer, const std::string& suffix) {
    if (!prompt.is_string()) fields.fail(prompts_name + suffix, kind_of(prompt), "a string");
    Probe probe{prompt.get<std::string>(), fields.answers_of(answer, answers_name + suffix)};
    if (!says_nothing(probe.prompt) && !probe.answers.empty()) probes.push_back(std::move(probe));
  };
  if (prompts.is_string()) return add(prompts, answers, "");
  if (!prompts.is_array()) fields.fail(prompts_name, kind_of(prompts), "a string or a list of strings");
  if (!answers.is_array() || answers.size() != prompts.size())
    fields.fail(answers_name, kind_of(answers), "a list as long as " + prompts_name.substr(prompts_name.rfind('.') + 1),
                "give one answer for each prompt");
  for (size_t i = 0; i < prompts.size(); ++i) add(prompts[i], answers[i], "[" + std::to_string(i) + "]");
}

/// One {prompt, ground_truth} object.
static void read_probe_object(const Fields& fields, const nlohmann::json& value, const std::string& name,
                              std::vector<Probe>& probes) {
  if (!value.is_object()) fields.fail(name, kind_of(value), "an object with prompt and ground_truth");
  Fields own = fields.within(value, name);
  if (!value.contains("prompt")) own.lacks("prompt", "a string");
  const nlohmann::json& prompt = own.raw("prompt");
  const nlohmann::json& given = own.raw("ground_truth");
  const nlohmann::json& truth = given.is_null() ? own.raw("answers") : given;  // as to_json(Fact) has them
  (void)own.rest(false);
  add_probes(fields, prompt, name + ".prompt", truth, name + ".ground_truth", probes);
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
  if (!says_nothing(question) && !answers.empty())
    fact.portability["one_hop"].push_back({question, std::move(answers)});
  if (hop.has("Recalled Relation")) fact.extra["recalled_relation"] = hop.text_or("Recalled Relation");
  const nlohmann::json rest = hop.rest();
  for (const auto& [key, value] : rest.items()) fact.extra["portability." + key] = value;
}

}  // namespace emend::datasets::detail
