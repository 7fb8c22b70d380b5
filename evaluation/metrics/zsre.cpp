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

const MetricInfo& zsre_info() {
  static const MetricInfo info = {
      "zsre",
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
      [](const json& raw) { return said_in_full(share_of_true("rewrite_prompts_correct")(raw)); },
      /*keyed=*/{},
      /*alone=*/true,
      /*memit_names=*/true};
  return info;
}

class Zsre final : public Metric {
 public:
  [[nodiscard]] const MetricInfo& info() const override { return zsre_info(); }
  [[nodiscard]] bool suits(const datasets::FactSet& facts) const override { return facts.format == "zsre"; }

  void plan(const MetricContext& context, ScoreSheet& sheet) override {
    for (size_t i = 0; i < context.facts.facts.size(); ++i) {
      const auto& fact = context.facts.facts[i];
      Record record;
      record.rewrite.push_back(sheet.add(i, fact.full_prompt(), fact.target_new));
      for (const auto& prompt : fact.paraphrase_prompts)
        record.paraphrases.push_back(sheet.add(i, prompt, fact.target_new));
      if (const auto loc = fact.locality.find("loc"); loc != fact.locality.end())
        for (const auto& probe : loc->second)
          record.neighborhood.push_back(
              sheet.add(i, probe.prompt.ends_with('?') ? probe.prompt : probe.prompt + "?", probe.answers.at(0)));
      records_.push_back(std::move(record));
    }
  }

  [[nodiscard]] MetricOutcome measure(const MetricContext&, const ScoreSheet& sheet) override {
    MetricOutcome outcome;
    for (const auto& record : records_)
      outcome.cases.push_back({{"rewrite_prompts_correct", hits(sheet, record.rewrite)},
                               {"paraphrase_prompts_correct", hits(sheet, record.paraphrases)},
                               {"neighborhood_prompts_correct", hits(sheet, record.neighborhood)}});
    return outcome;
  }

 private:
  struct Record {
    std::vector<size_t> rewrite, paraphrases, neighborhood;
  };

  /// Whether each token of each prompt's target is the argmax.
  static json hits(const ScoreSheet& sheet, const std::vector<size_t>& numbers) {
    json correct = json::array();
    for (size_t number : numbers) {
      const Score& score = sheet.at(number);
      for (size_t j = 0; j < score.labels.size(); ++j) correct.push_back(score.labels[j] == score.predicted[j]);
    }
    return correct;
  }

  std::vector<Record> records_;
};

}  // namespace

std::unique_ptr<Metric> make_zsre() {
  return std::make_unique<Zsre>();
}

}  // namespace emend::evaluation
