// zsRE as the MEMIT repository judges it (eval_utils_zsre.py).
//
// A target of T tokens counts as T predictions under teacher forcing; a record's accuracy is the share of them that are
// the argmax, over all its prompts of a kind. Neighbourhood: the Natural Questions prompt with "?" behind it, and its
// answer. Means over records; score: harmonic mean of the three accuracies. The published code predicts each token from
// the decoded and re-encoded text before it; one teacher-forced pass gives the same tokens except where re-encoding
// changes them.
#include <emend/evaluation/metric.h>

namespace emend::evaluation {
namespace {

using nlohmann::json;

class Zsre final : public Metric {
 public:
  using Metric::Metric;
  [[nodiscard]] bool suits(const datasets::FactSet& facts) const override { return facts.format == "zsre"; }

  void plan(const MetricContext& context, ScoreSheet& sheet) override {
    const auto& facts = context.facts.facts;
    outcome_.cases.resize(facts.size());
    for (size_t i = 0; i < facts.size(); ++i) {
      const auto& fact = facts[i];
      json& row = outcome_.cases[i];
      json &rewrite = row["rewrite_prompts_correct"] = json::array(),
           &paraphrases = row["paraphrase_prompts_correct"] = json::array(),
           &neighborhood = row["neighborhood_prompts_correct"] = json::array();
      // Whether each token of the target is the argmax, of all prompts in one list.
      const auto ask = [&](json& correct, const std::string& prompt, const std::string& target) {
        sheet.add(i, prompt, target, [&correct](const Score& score) {
          for (size_t j = 0; j < score.labels.size(); ++j) correct.push_back(score.labels[j] == score.predicted[j]);
        });
      };
      ask(rewrite, fact.full_prompt(), fact.target_new);
      for (const auto& prompt : fact.paraphrase_prompts) ask(paraphrases, prompt, fact.target_new);
      if (const auto loc = fact.locality.find("loc"); loc != fact.locality.end())
        for (const auto& probe : loc->second)
          ask(neighborhood, probe.prompt.ends_with('?') ? probe.prompt : probe.prompt + "?", probe.answers.at(0));
    }
  }
};

}  // namespace

MetricInfo make_zsre() {
  return {"zsre",
          "token accuracy on rewrite, paraphrase and unrelated questions; harmonic score",
          "MEMIT (Meng et al. 2023): eval_utils_zsre.py",
          1,
          {
              harmonic_score("Harmonic mean of the three accuracies; 0 if one of them is 0.",
                             {"efficacy_accuracy", "paraphrase_accuracy", "neighborhood_accuracy"}),
              {"efficacy_accuracy", "Efficacy",
               "Tokens of the target that are the argmax after the question (teacher forcing).", "%", true,
               share_of_true("rewrite_prompts_correct"), "efficacy"},
              {"paraphrase_accuracy", "Generalization", "The same after the question in other words.", "%", true,
               share_of_true("paraphrase_prompts_correct"), "paraphrases"},
              {"neighborhood_accuracy", "Specificity",
               "Tokens of the right answer that are the argmax after an unrelated question.", "%", true,
               share_of_true("neighborhood_prompts_correct"), "neighbours"},
          },
          made<Zsre>,
          [](const json& raw) { return said_in_full(share_of_true("rewrite_prompts_correct")(raw)); },
          /*keyed=*/{},
          /*alone=*/true,
          /*memit_names=*/true};
}

}  // namespace emend::evaluation
