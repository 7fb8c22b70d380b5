// CounterFact (Meng et al. 2022, §3.4 of ROME and §5.1 of MEMIT), as the MEMIT repository computes it.
//
// For every prompt both targets are scored by their mean per-token negative log-likelihood (nll):
//   success   rewrite, paraphrases: nll(true) > nll(new)      neighbourhood: nll(true) < nll(new)        (strict)
//   magnitude rewrite, paraphrases: exp(-nll(new)) - exp(-nll(true))         neighbourhood: the reverse
//   accuracy  every token of the right target (new; neighbourhood: true) is the argmax under teacher forcing
// Means are taken over the prompts of a record, then over the records. Score: harmonic mean of the three success means.
// Facts without target_true have accuracies only; facts without paraphrases or neighbours count in the other columns.
#include <emend/evaluation/metric.h>
#include <emend/evaluation/statistics.h>

#include <cmath>

namespace emend::evaluation {
namespace {

using nlohmann::json;

const MetricInfo& counterfact_info() {
  static const MetricInfo info = {
      "counterfact",
      "success, magnitude and accuracy on rewrite, paraphrase and neighbourhood prompts; harmonic score",
      "ROME and MEMIT (Meng et al. 2022/23): eval_utils_counterfact.py, summarize.py",
      1,
      {
          {"score", "S", "Harmonic mean of the three success rates; 0 if one of them is 0.", "%", true},
          {"efficacy_success", "ES",
           "Facts whose new target is more probable than the old one after the fact's own prompt (mean negative "
           "log-likelihood "
           "per token, strictly lower).",
           "%", true},
          {"paraphrase_success", "PS", "The same comparison on the paraphrases of the prompt.", "%", true},
          {"neighborhood_success", "NS",
           "Prompts about other subjects with the same old answer on which the old answer is still the more probable "
           "one.",
           "%", true},
          {"efficacy_magnitude", "EM",
           "Mean difference of probabilities, new minus old target, after the fact's own prompt.", "%", true},
          {"paraphrase_magnitude", "PM", "The same difference on the paraphrases.", "%", true},
          {"neighborhood_magnitude", "NM",
           "Mean difference of probabilities, old minus new target, on the neighbourhood prompts.", "%", true},
          {"efficacy_accuracy", "EA", "Facts whose new target is predicted token for token (teacher forcing).", "%",
           true},
          {"paraphrase_accuracy", "PA", "Paraphrases after which the new target is predicted token for token.", "%",
           true},
          {"neighborhood_accuracy", "NA",
           "Neighbourhood prompts after which the old answer is predicted token for token.", "%", true},
      }};
  return info;
}

/// The two targets of one prompt.
struct Pair {
  size_t target_new = 0;
  std::optional<size_t> target_true;
};

class Counterfact final : public Metric {
 public:
  [[nodiscard]] const MetricInfo& info() const override { return counterfact_info(); }

  [[nodiscard]] bool suits(const datasets::FactSet& facts) const override {
    if (facts.format == "zsre") return false;  // its own protocol compares other things
    for (const auto& fact : facts.facts)
      if (fact.target_true && (!fact.neighborhood_prompts.empty() || !fact.paraphrase_prompts.empty())) return true;
    return false;
  }

  void plan(const MetricContext& context, ScoreSheet& sheet) override {
    for (size_t i = 0; i < context.facts.facts.size(); ++i) {
      const auto& fact = context.facts.facts[i];
      const auto pair = [&](const std::string& prompt) {
        Pair added;
        added.target_new = sheet.add(i, prompt, fact.target_new);
        if (fact.target_true) added.target_true = sheet.add(i, prompt, *fact.target_true);
        return added;
      };
      Record record;
      record.rewrite = {pair(fact.full_prompt())};
      for (const auto& prompt : fact.paraphrase_prompts) record.paraphrases.push_back(pair(prompt));
      if (fact.target_true)
        for (const auto& prompt : fact.neighborhood_prompts) record.neighborhood.push_back(pair(prompt));
      records_.push_back(std::move(record));
    }
  }

  [[nodiscard]] MetricOutcome finish(const MetricContext& context, const ScoreSheet& sheet) override {
    MetricOutcome outcome;
    std::map<std::string, std::vector<std::optional<double>>> columns;
    for (const auto& record : records_) {
      json& row = outcome.cases.emplace_back(json::object());
      judge(sheet, record.rewrite, "efficacy", "rewrite_prompts", false, columns, row);
      judge(sheet, record.paraphrases, "paraphrase", "paraphrase_prompts", false, columns, row);
      judge(sheet, record.neighborhood, "neighborhood", "neighborhood_prompts", true, columns, row);
    }
    json& summary = outcome.summary;
    summary["n"] = records_.size();
    summary["score"] = nullptr;
    for (const auto& [key, values] : columns) put_mean(summary, key, values);
    const std::vector<std::string> success = {"efficacy_success", "paraphrase_success", "neighborhood_success"};
    std::vector<double> means;
    std::vector<std::vector<std::optional<double>>> values;
    for (const auto& key : success)
      if (!columns.empty() && !summary[key].is_null()) {
        means.push_back(summary[key].get<double>());
        values.push_back(columns[key]);
      }
    if (means.size() < success.size()) return outcome;
    summary["score"] = *harmonic_mean(means);
    if (const auto range = bootstrap_harmonic(values, context.options.bootstrap, context.options.seed))
      summary["score_ci95"] = {100 * range->first, 100 * range->second};
    return outcome;
  }

 private:
  struct Record {
    std::vector<Pair> rewrite, paraphrases, neighborhood;
  };

  /// Adds one record's means to the columns and its raw values to `row`, named as in the MEMIT repository's files.
  static void judge(const ScoreSheet& sheet, const std::vector<Pair>& pairs, const std::string& name,
                    const std::string& raw_name, bool true_is_right,
                    std::map<std::string, std::vector<std::optional<double>>>& columns, json& row) {
    std::vector<double> success, magnitude, accuracy;
    json probs = json::array(), correct = json::array();
    for (const auto& pair : pairs) {
      const Score& fresh = sheet.at(pair.target_new);
      const bool right = true_is_right ? sheet.at(*pair.target_true).all_correct() : fresh.all_correct();
      accuracy.push_back(right ? 1 : 0);
      correct.push_back(right);
      const double nll_new = fresh.mean_nll();
      probs.push_back({{"target_new", nll_new}, {"target_true", nullptr}});
      if (!pair.target_true) continue;
      const double nll_true = sheet.at(*pair.target_true).mean_nll();
      probs.back()["target_true"] = nll_true;
      success.push_back((true_is_right ? nll_true < nll_new : nll_true > nll_new) ? 1 : 0);
      const double difference = std::exp(-nll_new) - std::exp(-nll_true);
      magnitude.push_back(true_is_right ? -difference : difference);
    }
    columns[name + "_success"].push_back(record_mean(success));
    columns[name + "_magnitude"].push_back(record_mean(magnitude));
    columns[name + "_accuracy"].push_back(record_mean(accuracy));
    row[raw_name + "_probs"] = std::move(probs);
    row[raw_name + "_correct"] = std::move(correct);
  }

  std::vector<Record> records_;
};

}  // namespace

std::unique_ptr<Metric> make_counterfact() {
  return std::make_unique<Counterfact>();
}

}  // namespace emend::evaluation
