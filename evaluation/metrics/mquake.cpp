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

const MetricInfo& mquake_info() {
  static const MetricInfo info = {
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
      [](const json& raw) { return said_in_full(value_of("edit_wise")(raw)); },
      /*keyed=*/{},
      /*alone=*/false};
  return info;
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
  [[nodiscard]] const MetricInfo& info() const override { return mquake_info(); }

  [[nodiscard]] bool suits(const datasets::FactSet& facts) const override {
    return std::ranges::count(facts.groups, "mquake", &datasets::FactGroup::kind) > 0;
  }

  void plan(const MetricContext& context, ScoreSheet& sheet) override {
    const auto& facts = context.facts.facts;
    const auto blank = [](const std::string& text) { return trimmed(text).empty(); };
    const auto as_question = [](const std::string& text) { return "Q: " + text + "\nA:"; };
    for (size_t i = 0; i < facts.size(); ++i)
      edits_.push_back(sheet.add(i, facts[i].full_prompt(), facts[i].target_new));
    for (const auto& group : context.facts.groups) {
      if (group.kind != "mquake" || group.facts.empty()) continue;
      Instance instance{&group, {}, {}, {}};
      std::map<std::string, size_t> edited;  // statement → fact
      for (size_t fact : group.facts) edited.emplace(facts.at(fact).full_prompt(), fact);
      const size_t owner = group.facts[0];
      for (const auto& hop : group.new_single_hops) {
        const auto found = edited.find(hop.cloze);
        if (found != edited.end())
          instance.hops.push_back({edits_[found->second]});
        else if (!hop.answers.empty() && !blank(hop.cloze))
          instance.hops.push_back(spellings(sheet, owner, kStatements, hop.cloze, hop.answers));
        else if (!hop.answers.empty() && !blank(hop.question))
          instance.hops.push_back(spellings(sheet, owner, kQuestions, as_question(hop.question), hop.answers));
      }
      for (const auto& question : group.questions) {
        const std::string asked = as_question(question);
        const auto ask = [&](std::vector<Spellings>& questions, const std::vector<std::string>& answers) {
          if (!answers.empty()) questions.push_back(spellings(sheet, owner, kQuestions, asked, answers));
        };
        ask(instance.questions, group.new_answers);
        ask(instance.old_questions, group.answers);
      }
      instances_.push_back(std::move(instance));
    }
  }

  [[nodiscard]] MetricOutcome measure(const MetricContext&, const ScoreSheet& sheet) override {
    MetricOutcome outcome;
    for (size_t number : edits_) outcome.cases.push_back({{"edit_wise", sheet.at(number).all_correct()}});
    for (const auto& instance : instances_) {
      const json hops = verdicts(sheet, instance.hops), questions = verdicts(sheet, instance.questions);
      outcome.groups.push_back({{"case_id", instance.group->case_id},
                                {"hops", hops},
                                {"questions", questions},
                                {"old_questions", verdicts(sheet, instance.old_questions)},
                                {"instance_wise", hops.empty() ? json() : json(all(hops))},
                                {"multi_hop", questions.empty() ? json() : json(any(questions))}});
    }
    outcome.summary["instances"] = instances_.size();
    return outcome;
  }

 private:
  using Spellings = std::vector<size_t>;
  struct Instance {
    const datasets::FactGroup* group;
    std::vector<Spellings> hops, questions, old_questions;
  };

  static Spellings spellings(ScoreSheet& sheet, size_t owner, const std::string& examples, const std::string& question,
                             const std::vector<std::string>& answers) {
    Spellings numbers;
    for (const auto& answer : std::set<std::string>(answers.begin(), answers.end()))
      numbers.push_back(sheet.add(owner, examples + question, answer + "\n", question));
    return numbers;
  }

  static json verdicts(const ScoreSheet& sheet, const std::vector<Spellings>& list) {
    json out = json::array();
    for (const auto& numbers : list) {
      bool answered = false;
      for (size_t number : numbers) answered = answered || sheet.at(number).all_correct();
      out.push_back(answered);
    }
    return out;
  }

  std::vector<size_t> edits_;
  std::vector<Instance> instances_;
};

}  // namespace

std::unique_ptr<Metric> make_mquake() {
  return std::make_unique<Mquake>();
}

}  // namespace emend::evaluation
