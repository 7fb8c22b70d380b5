#include <emend/core/error.h>
#include <emend/core/sha256.h>
#include <emend/datasets/detail/reader.h>
#include <emend/datasets/fact.h>

namespace emend::datasets {

std::string with_subject(std::string prompt, std::string_view subject) {
  if (const size_t slot = prompt.find("{}"); slot != std::string::npos) prompt.replace(slot, 2, subject);
  return prompt;
}

std::string with_slot(std::string prompt, std::string_view subject) {
  const size_t at =
      subject.empty() || prompt.find("{}") != std::string::npos ? std::string::npos : prompt.find(subject);
  return at == std::string::npos ? prompt : prompt.replace(at, subject.size(), "{}");
}

std::string Fact::full_prompt() const {
  return with_subject(prompt, subject);
}

std::string place_of(const std::string& source, int64_t line, int64_t row) {
  if (source.ends_with("[]")) return source.substr(0, source.size() - 1) + std::to_string(line - 1) + "]";
  return source + ":" + std::to_string(line) + (row > 0 ? " (row " + std::to_string(row) + ")" : "");
}

std::string Fact::where() const {
  if (line > 0) return place_of(source, line, row);
  return "fact " + std::to_string(case_id);
}

static constexpr size_t kMaxTextBytes = 32 * 1024;  // longer ones take minutes and exceed what models read

nlohmann::json to_json(const Fact& fact) {
  nlohmann::json result = {
      {"case_id", fact.case_id}, {"prompt", fact.prompt}, {"subject", fact.subject}, {"target_new", fact.target_new}};
  const auto put = [&](const char* key, nlohmann::json value) {
    if (!value.empty()) result[key] = std::move(value);  // empty members are left out
  };
  if (fact.target_true) result["target_true"] = *fact.target_true;
  if (!fact.relation_id.empty()) result["relation_id"] = fact.relation_id;
  put("target_true_aliases", fact.target_true_aliases);
  for (const auto& prompts : detail::kPromptLists) put(prompts.key, fact.*prompts.member);
  put("locality", detail::write_probes(fact.locality, "answers"));
  put("portability", detail::write_probes(fact.portability, "answers"));
  put("extra", fact.extra);
  return result;
}

static nlohmann::json to_json(const FactGroup& group) {
  const auto hops = [](const std::vector<Hop>& list) {
    auto all = nlohmann::json::array();
    for (const Hop& hop : list) all.push_back({hop.question, hop.cloze, hop.answers});
    return all;
  };
  return {group.kind,    group.facts,       group.sequential,        group.questions,
          group.answers, group.new_answers, hops(group.single_hops), hops(group.new_single_hops)};
}

std::string fingerprint_of(const FactSet& facts) {
  return facts.fingerprint.empty() ? fingerprint(facts.facts, facts.groups) : facts.fingerprint;
}

std::string fingerprint(const std::vector<Fact>& facts, const std::vector<FactGroup>& groups) {
  Sha256 hash;
  hash.update("emend facts 1\n");
  const auto add = [&](const nlohmann::json& value) {
    // `replace`: facts built in code may hold bytes that are not UTF-8.
    hash.update(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    hash.update("\n");
  };
  for (const Fact& fact : facts) add(to_json(fact));
  for (const FactGroup& group : groups) add(to_json(group));
  return hash.hex();
}

namespace detail {

void each_text(const Fact& fact, const std::function<void(const char* what, const std::string& text)>& look) {
  look("the prompt", fact.prompt);
  look("the subject", fact.subject);
  look("target_new", fact.target_new);
  if (fact.target_true) look("target_true", *fact.target_true);
  const auto list = [&](const char* what, const std::vector<std::string>& texts) {
    for (const std::string& text : texts) look(what, text);
  };
  list("an alias of target_true", fact.target_true_aliases);
  for (const auto& prompts : kPromptLists) list(prompts.what, fact.*prompts.member);
  for (const auto* probes : {&fact.locality, &fact.portability})
    for (const auto& [name, group] : *probes)
      for (const Probe& probe : group) {
        look("a probe", probe.prompt);
        list("the answer of a probe", probe.answers);
      }
}

}  // namespace detail

void validate(const Fact& fact, const std::string& where) {
  const auto refuse = [&](const std::string& got, const std::string& expected) {
    emend::refuse({where.empty() ? fact.where() : where, got, expected, "correct the fact"});
  };
  const size_t slots = detail::count_of(fact.prompt, "{}");
  if (slots != 1)
    refuse("the prompt \"" + shorten(fact.prompt) + "\" has " + std::to_string(slots) + " places for the subject",
           "exactly one {}");
  if (says_nothing(fact.subject)) refuse("the subject is blank", "the words that take the place of {}");
  if (says_nothing(fact.target_new)) refuse("target_new is blank", "the new answer");
  if (fact.target_true && says_nothing(*fact.target_true)) refuse("target_true is blank", "the old answer, or none");
  detail::each_text(fact, [&](const char* what, const std::string& text) {
    if (text.size() > kMaxTextBytes)
      refuse(what + (" \"" + shorten(text, 40)) + "\" of " + std::to_string(text.size()) + " bytes",
             "at most " + std::to_string(kMaxTextBytes) + " bytes: a fact is a sentence, not a document");
  });
}

}  // namespace emend::datasets
