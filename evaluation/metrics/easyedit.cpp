// EasyEdit's metrics (evaluate.py, evaluate_utils.py), default path: teacher forcing on prompt + " " + target.
//
// A prompt's accuracy is the share of the target's tokens that are the argmax.
//   rewrite_acc   the edit prompt      rephrase_acc  the rephrased prompts      portability  each key's prompts, own
//   answers locality      share of positions of the given answer at which the edited model predicts the token that it
//   predicted
//                 before the edit; the answer only fixes the positions, it need not be what the model says
// Per record the mean over the prompts (of a key), then the mean over the records that have some.
#include <emend/evaluation/detail/generate_texts.h>
#include <emend/evaluation/metric.h>
#include <emend/evaluation/statistics.h>
#include <emend/evaluation/text_metrics.h>

#include <set>

namespace emend::evaluation {
namespace {

using nlohmann::json;

const MetricInfo& easyedit_info() {
  static const MetricInfo info = {
      "easyedit",
      "token accuracy of rewrite, rephrase, portability; unchanged predictions on locality prompts; fluency with "
      "--generation",
      "EasyEdit (Wang et al. 2024), teacher forcing",
      1,
      {
          {"rewrite_acc", "Reliability",
           "Tokens of the new target that are the argmax after the edit prompt (teacher forcing).", "%", true},
          {"rephrase_acc", "Generalization", "The same after rephrased prompts.", "%", true},
          {"locality_acc", "Locality",
           "Predicted tokens on unrelated prompts that are the same as before the edit, mean over all of a record's "
           "locality keys.",
           "%", true},
          {"portability_acc", "Portability",
           "Tokens of the answers to questions that follow from the edit, mean over all of a record's portability "
           "keys.",
           "%", true},
          {"fluency", "Fluency", "Weighted entropy of 2- and 3-grams of text generated from the edit prompt.",
           "bit × 100", true},
      }};
  return info;
}

using Numbers = std::map<std::string, std::vector<size_t>>;

class EasyEdit final : public Metric {
 public:
  [[nodiscard]] const MetricInfo& info() const override { return easyedit_info(); }
  [[nodiscard]] bool suits(const datasets::FactSet& facts) const override {
    return !facts.facts.empty() && facts.format != "mquake";
  }

  void plan(const MetricContext& context, ScoreSheet& sheet) override {
    for (size_t i = 0; i < context.facts.facts.size(); ++i) {
      const auto& fact = context.facts.facts[i];
      Record record;
      record.rewrite = sheet.add(i, fact.full_prompt(), fact.target_new);
      for (const auto& prompt : fact.paraphrase_prompts)
        record.rephrase.push_back(sheet.add(i, prompt, fact.target_new));
      if (fact.target_true)
        for (const auto& prompt : fact.neighborhood_prompts)
          record.locality["neighborhood"].push_back(sheet.add(i, prompt, *fact.target_true));
      const auto add_all = [&](const std::map<std::string, std::vector<datasets::Probe>>& probes, Numbers& numbers) {
        for (const auto& [key, list] : probes)
          for (const auto& probe : list)
            if (!probe.answers.empty()) numbers[key].push_back(sheet.add(i, probe.prompt, probe.answers[0]));
      };
      add_all(fact.locality, record.locality);
      add_all(fact.portability, record.portability);
      records_.push_back(std::move(record));
    }
  }

  [[nodiscard]] MetricOutcome finish(const MetricContext& context, const ScoreSheet& sheet) override {
    MetricOutcome outcome;
    Columns locality, portability;
    std::vector<std::optional<double>> rewrite, rephrase;
    for (size_t i = 0; i < records_.size(); ++i) {
      const Record& record = records_[i];
      json& row = outcome.cases.emplace_back(json::object());
      rewrite.push_back(sheet.at(record.rewrite).token_accuracy());
      rephrase.push_back(mean_accuracy(sheet, record.rephrase));
      row["rewrite_acc"] = *rewrite.back();
      row["rephrase_acc"] = rephrase.back() ? json(*rephrase.back()) : json();
      judge_portability(sheet, record, i, portability, row);
      judge_locality(context, sheet, record, i, locality, row);
    }
    json& summary = outcome.summary;
    summary["n"] = records_.size();
    put_mean(summary, "rewrite_acc", rewrite);
    put_mean(summary, "rephrase_acc", rephrase);
    put_columns(summary, "locality", locality);
    put_columns(summary, "portability", portability);
    if (context.options.generation && context.model) add_fluency(context, outcome);
    return outcome;
  }

  [[nodiscard]] json key(const EvaluateOptions& options) const override {
    return options.generation ? json{options.generation_length, options.seed} : json();
  }

 private:
  struct Record {
    size_t rewrite = 0;
    std::vector<size_t> rephrase;
    Numbers locality, portability;
  };
  /// Values by key, with the number of the record; the empty key holds the mean over a record's keys.
  using Columns = std::map<std::string, std::vector<std::optional<double>>>;

  static void add_fluency(const MetricContext& context, MetricOutcome& outcome) {
    std::vector<std::string> prompts;
    for (const auto& fact : context.facts.facts) prompts.push_back(fact.full_prompt());
    std::vector<std::optional<double>> values;
    for (const auto& text : detail::generate_texts(*context.model, prompts, context.options)) {
      outcome.cases[values.size()]["fluency"] = weighted_ngram_entropy(text);
      values.push_back(weighted_ngram_entropy(text));
    }
    put_mean(outcome.summary, "fluency", values);
  }

  static std::optional<double> mean_accuracy(const ScoreSheet& sheet, const std::vector<size_t>& numbers) {
    std::vector<double> values;
    for (size_t number : numbers) values.push_back(sheet.at(number).token_accuracy());
    return record_mean(values);
  }

  static void judge_portability(const ScoreSheet& sheet, const Record& record, size_t i, Columns& columns, json& row) {
    std::vector<double> all;
    row["portability"] = json::object();
    for (const auto& [key, numbers] : record.portability) {
      const double value = *mean_accuracy(sheet, numbers);
      row["portability"][key + "_acc"] = value;
      columns[key].push_back(value);
      all.push_back(value);
    }
    columns[""].push_back(record_mean(all));
  }

  /// Predictions are kept in the case so that a later evaluation can compare with them.
  static void judge_locality(const MetricContext& context, const ScoreSheet& sheet, const Record& record, size_t i,
                             Columns& columns, json& row) {
    std::vector<double> all;
    row["locality"] = json::object();
    row["locality_predictions"] = json::object();
    for (const auto& [key, numbers] : record.locality) {
      json predictions = json::array();
      for (size_t number : numbers) predictions.push_back(sheet.at(number).predicted);
      if (const json before = predictions_before(context, i, key); !before.is_null()) {
        const double value = share_equal(before, predictions);
        row["locality"][key + "_acc"] = value;
        columns[key].push_back(value);
        all.push_back(value);
      }
      row["locality_predictions"][key] = std::move(predictions);
    }
    columns[""].push_back(record_mean(all));
  }

  static json predictions_before(const MetricContext& context, size_t i, const std::string& key) {
    const Evaluation* before = context.options.before;
    if (!before || i >= before->cases.size()) return nullptr;
    const auto at = before->cases[i].find("easyedit");
    if (at == before->cases[i].end() || !at->contains("locality_predictions")) return nullptr;
    const auto& predictions = at->at("locality_predictions");
    return predictions.contains(key) ? predictions.at(key) : json();
  }

  /// Mean over prompts of the share of positions with the same token.
  static double share_equal(const json& before, const json& after) {
    double sum = 0;
    for (size_t p = 0; p < after.size(); ++p) {
      size_t same = 0;
      for (size_t j = 0; j < after[p].size(); ++j)
        same += p < before.size() && j < before[p].size() && before[p][j] == after[p][j] ? 1 : 0;
      sum += static_cast<double>(same) / static_cast<double>(after[p].size());
    }
    return sum / static_cast<double>(after.size());
  }

  static void put_columns(json& summary, const std::string& name, const Columns& columns) {
    put_mean(summary, name + "_acc", columns.count("") ? columns.at("") : std::vector<std::optional<double>>{});
    json keys = json::object();
    for (const auto& [key, values] : columns)
      if (!key.empty()) put_mean(keys, key + "_acc", values);
    summary[name] = std::move(keys);
  }

  std::vector<Record> records_;
};

}  // namespace

std::unique_ptr<Metric> make_easyedit() {
  return std::make_unique<EasyEdit>();
}

}  // namespace emend::evaluation
