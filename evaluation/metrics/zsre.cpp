// zsRE as the MEMIT repository judges it (eval_utils_zsre.py).
//
// A target of T tokens counts as T predictions under teacher forcing; a record's accuracy is the share of them that are
// the argmax, over all its prompts of a kind. Neighbourhood: the Natural Questions prompt with "?" behind it, and its
// answer. Means over records; score: harmonic mean of the three accuracies. The published code predicts each token from
// the decoded and re-encoded text before it; one teacher-forced pass gives the same tokens except where re-encoding
// changes them.
#include <emend/evaluation/metric.h>
#include <emend/evaluation/statistics.h>

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
          {"score", "S", "Harmonic mean of the three accuracies; 0 if one of them is 0.", "%", true},
          {"efficacy_accuracy", "Efficacy",
           "Tokens of the target that are the argmax after the question (teacher forcing).", "%", true},
          {"paraphrase_accuracy", "Generalization", "The same after the question in other words.", "%", true},
          {"neighborhood_accuracy", "Specificity",
           "Tokens of the right answer that are the argmax after an unrelated question.", "%", true},
      }};
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

  [[nodiscard]] MetricOutcome finish(const MetricContext& context, const ScoreSheet& sheet) override {
    MetricOutcome outcome;
    std::vector<std::vector<std::optional<double>>> columns(3);
    for (const auto& record : records_) {
      json& row = outcome.cases.emplace_back(json::object());
      columns[0].push_back(judge(sheet, record.rewrite, row["rewrite_prompts_correct"]));
      columns[1].push_back(judge(sheet, record.paraphrases, row["paraphrase_prompts_correct"]));
      columns[2].push_back(judge(sheet, record.neighborhood, row["neighborhood_prompts_correct"]));
    }
    json& summary = outcome.summary;
    summary["n"] = records_.size();
    summary["score"] = nullptr;
    put_mean(summary, "efficacy_accuracy", columns[0]);
    put_mean(summary, "paraphrase_accuracy", columns[1]);
    put_mean(summary, "neighborhood_accuracy", columns[2]);
    std::vector<double> means;
    for (const char* key : {"efficacy_accuracy", "paraphrase_accuracy", "neighborhood_accuracy"})
      if (!summary[key].is_null()) means.push_back(summary[key].get<double>());
    if (means.size() < 3) return outcome;
    summary["score"] = *harmonic_mean(means);
    if (const auto range = bootstrap_harmonic(columns, context.options.bootstrap, context.options.seed))
      summary["score_ci95"] = {100 * range->first, 100 * range->second};
    return outcome;
  }

 private:
  struct Record {
    std::vector<size_t> rewrite, paraphrases, neighborhood;
  };

  static std::optional<double> judge(const ScoreSheet& sheet, const std::vector<size_t>& numbers, json& correct) {
    std::vector<double> hits;
    correct = json::array();
    for (size_t number : numbers) {
      const Score& score = sheet.at(number);
      for (size_t j = 0; j < score.labels.size(); ++j) {
        const bool hit = score.labels[j] == score.predicted[j];
        hits.push_back(hit ? 1 : 0);
        correct.push_back(hit);
      }
    }
    return record_mean(hits);
  }

  std::vector<Record> records_;
};

}  // namespace

std::unique_ptr<Metric> make_zsre() {
  return std::make_unique<Zsre>();
}

}  // namespace emend::evaluation
