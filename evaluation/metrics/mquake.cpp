// MQuAKE (Zhong et al. 2023): does an edit carry over to questions that need several facts?
//
//   edit-wise      each edited statement is completed with its new object, no examples in front
//   instance-wise  every single hop of the instance is answered: edited ones without examples, the others behind
//                  examples, as a statement, or where the data have none as a question
//   multi-hop      one of the instance's questions is answered with the new answer or an alias of it, behind examples
// "Answered" means that greedy decoding writes exactly one of the spellings; with examples in front, followed by a line
// break. That is decided by teacher forcing every spelling, which gives the same verdict without generating. The
// published examples are replaced by the general ones below: figures are comparable between runs of emend, and with the
// paper's only in kind.
#include <emend/core/text.h>
#include <emend/evaluation/metric.h>

#include <algorithm>
#include <set>

namespace emend::evaluation {
namespace {

using nlohmann::json;

bool all(const json& verdicts) {
  return std::ranges::all_of(verdicts, [](const json& v) { return v.get<bool>(); });
}
bool any(const json& verdicts) {
  return std::ranges::any_of(verdicts, [](const json& v) { return v.get<bool>(); });
}

/// Whether an instance still gets the answer from before the edits.
std::optional<double> old_answer(const json& instance) {
  const json& questions = instance.at("old_questions");
  return questions.empty() ? std::nullopt : std::optional(any(questions) ? 1.0 : 0.0);
}

constexpr const char* kStatements =
    "The capital of France is Paris\n"
    "The author of Hamlet is William Shakespeare\n"
    "The official language of Brazil is Portuguese\n"
    "The Eiffel Tower is located in the city of Paris\n"
    "Albert Einstein was born in the city of Ulm\n"
    "The chief executive officer of Tesla is Elon Musk\n"
    "Basketball was created in the country of United States of America\n"
    "Kenya is located in the continent of Africa\n";

constexpr const char* kQuestions =
    "Q: What is the capital of the country where the Colosseum stands?\nA: Rome\n"
    "Q: In which language did the author of Don Quixote write?\nA: Spanish\n"
    "Q: On which continent lies the country whose capital is Nairobi?\nA: Africa\n"
    "Q: Who is the author of the novel in which Captain Ahab appears?\nA: Herman Melville\n"
    "Q: What is the official language of the country where Mozart was born?\nA: German\n"
    "Q: In which city are the headquarters of the company that makes the iPhone?\nA: Cupertino\n"
    "Q: What is the currency of the country in which Mount Fuji is located?\nA: yen\n"
    "Q: Which religion is followed by the head of the Catholic Church?\nA: Christianity\n";

class Mquake final : public Metric {
 public:
  using Metric::Metric;

  [[nodiscard]] bool suits(const datasets::FactSet& facts) const override {
    return std::ranges::count(facts.groups, "mquake", &datasets::FactGroup::kind) > 0;
  }

  void plan(const MetricContext& context, ScoreSheet& sheet) override {
    const auto& facts = context.facts.facts;
    outcome_.cases.resize(facts.size());
    for (size_t i = 0; i < facts.size(); ++i)
      sheet.add(i, facts[i].full_prompt(), facts[i].target_new,
                [&verdict = outcome_.cases[i]["edit_wise"]](const Score& score) { verdict = score.all_correct(); });
    for (const auto& group : context.facts.groups)
      if (group.kind == "mquake" && !group.facts.empty()) plan_instance(context, group, sheet);
  }

  void measure(const MetricContext&) override {
    for (const auto& [verdicts, place, fact] : edited_hops_) (*verdicts)[place] = outcome_.cases[fact]["edit_wise"];
    for (json& instance : outcome_.groups) {
      const json &hops = instance["hops"], &questions = instance["questions"];
      instance["instance_wise"] = hops.empty() ? json() : json(all(hops));
      instance["multi_hop"] = questions.empty() ? json() : json(any(questions));
    }
    outcome_.summary["instances"] = outcome_.groups.size();
  }

 private:
  void plan_instance(const MetricContext& context, const datasets::FactGroup& group, ScoreSheet& sheet) {
    const auto blank = [](const std::string& text) { return trimmed(text).empty(); };
    const auto as_question = [](const std::string& text) { return "Q: " + text + "\nA:"; };
    json& instance = outcome_.groups.emplace_back();
    instance["case_id"] = group.case_id;
    json &hops = instance["hops"] = json::array(), &questions = instance["questions"] = json::array(),
         &old_questions = instance["old_questions"] = json::array();
    // One more verdict: whether the model says one of the spellings.
    const auto ask = [&](json& verdicts, const std::string& examples, const std::string& question,
                         const std::vector<std::string>& answers) {
      const size_t place = verdicts.size();
      verdicts.push_back(false);
      const auto read = [&verdicts, place](const Score& score) {
        if (score.all_correct()) verdicts[place] = true;
      };
      for (const auto& answer : std::set<std::string>(answers.begin(), answers.end()))
        sheet.add(group.facts[0], examples + question, answer + "\n", read, question);
    };
    std::map<std::string, size_t> edited;  // statement → fact
    for (size_t fact : group.facts) edited.emplace(context.facts.facts.at(fact).full_prompt(), fact);
    for (const auto& hop : group.new_single_hops) {
      if (const auto found = edited.find(hop.cloze); found != edited.end()) {
        edited_hops_.push_back({&hops, hops.size(), found->second});
        hops.push_back(false);
      } else if (!hop.answers.empty() && !blank(hop.cloze)) {
        ask(hops, kStatements, hop.cloze, hop.answers);
      } else if (!hop.answers.empty() && !blank(hop.question)) {
        ask(hops, kQuestions, as_question(hop.question), hop.answers);
      }
    }
    for (const auto& question : group.questions) {
      if (!group.new_answers.empty()) ask(questions, kQuestions, as_question(question), group.new_answers);
      if (!group.answers.empty()) ask(old_questions, kQuestions, as_question(question), group.answers);
    }
  }

  struct EditedHop {
    json* verdicts;
    size_t place, fact;
  };
  std::vector<EditedHop> edited_hops_;  // answered by the facts' own prompts
};

}  // namespace

MetricInfo make_mquake() {
  return {
      "mquake",
      "edit-wise, instance-wise and multi-hop accuracy on chains of facts",
      "MQuAKE (Zhong et al. 2023), with examples of emend's own",
      3,
      {
          {"edit_wise", "Edit-wise",
           "Edited statements completed with the new object, token for token (teacher forcing).", "%", true,
           value_of("edit_wise")},
          of_groups({"instance_wise", "Instance-wise", "Instances of which every single hop is answered.", "%", true,
                     value_of("instance_wise")}),
          of_groups({"multi_hop", "Multi-hop",
                     "Instances of which at least one multi-hop question is answered with the new answer or an alias.",
                     "%", true, value_of("multi_hop")}),
          of_groups({"multi_hop_old", "Multi-hop (old)", "The same with the answer from before the edits.", "%", false,
                     old_answer}),
      },
      made<Mquake>,
      [](const json& raw) { return said_in_full(value_of("edit_wise")(raw)); },
      /*keyed=*/{},
      /*alone=*/false};
}

}  // namespace emend::evaluation
