// EasyEdit's metrics (evaluate.py, evaluate_utils.py), default path: teacher forcing on prompt + " " + target.
//
// A prompt's accuracy is the share of the target's tokens that are the argmax.
//   rewrite_acc   the edit prompt      rephrase_acc  the rephrased prompts
//   portability   each key's prompts, own answers
//   locality      share of positions of the given answer at which the edited model predicts the token that it predicted
//                 before the edit; the answer only fixes the positions, it need not be what the model says
// Per record the mean over the prompts (of a key), then the mean over the records that have some.
#include <emend/evaluation/detail/generation.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/metric.h>
#include <emend/evaluation/text_metrics.h>

#include <algorithm>

namespace emend::evaluation {
namespace {

using nlohmann::json;

const MetricInfo& easyedit_info() {
  static const MetricInfo info = {
      "easyedit",
      "token accuracy of rewrite, rephrase, portability; unchanged predictions on locality prompts; fluency where text "
      "is generated",
      "EasyEdit (Wang et al. 2024), teacher forcing",
      3,
      {
          {"rewrite_acc", "Reliability",
           "Tokens of the new target that are the argmax after the edit prompt (teacher forcing).", "%", true,
           value_of("rewrite_acc"), "rewrite"},
          {"rephrase_acc", "Generalization", "The same after rephrased prompts.", "%", true, value_of("rephrase_acc"),
           "rephrase"},
          {"locality_acc", "Locality",
           "Predicted tokens on unrelated prompts that are the same as before the edit, mean over all of a record's "
           "locality keys.",
           "%", true, mean_of_keys("locality"), "locality"},
          {"portability_acc", "Portability",
           "Tokens of the answers to questions that follow from the edit, mean over all of a record's portability "
           "keys.",
           "%", true, mean_of_keys("portability"), "portability"},
          optional({"fluency", "Fluency", "Weighted entropy of 2- and 3-grams of text generated from the edit prompt.",
                    "bit × 100", true, value_of("fluency")}),
      },
      [](const json& raw) { return said_in_full(value_of("rewrite_acc")(raw)); },
      /*keyed=*/{"locality", "portability"}};
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
          if (!brings(fact, prompt)) record.locality["neighborhood"].push_back(sheet.add(i, prompt, *fact.target_true));
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

  void observe(const models::Model& model, const MetricContext& context, size_t begin, size_t end) override {
    if (!context.options.generation) return;
    std::vector<std::string> prompts;
    for (size_t i = begin; i < end; ++i) prompts.push_back(context.options.asked(context.facts.facts[i].full_prompt()));
    for (auto& text : detail::generate_texts(model, prompts, context.options, begin)) texts_.push_back(std::move(text));
  }

  [[nodiscard]] MetricOutcome measure(const MetricContext& context, const ScoreSheet& sheet) override {
    MetricOutcome outcome;
    for (size_t i = 0; i < records_.size(); ++i) {
      const Record& record = records_[i];
      json& row = outcome.cases.emplace_back(json::object());
      row["rewrite_acc"] = sheet.at(record.rewrite).token_accuracy();
      row["rephrase_acc"] = detail::or_null(mean_accuracy(sheet, record.rephrase));
      row["portability"] = json::object();
      for (const auto& [key, numbers] : record.portability)
        row["portability"][key + "_acc"] = *mean_accuracy(sheet, numbers);
      put_locality(context, sheet, record, i, row);
    }
    for (size_t i = 0; i < texts_.size(); ++i) outcome.cases[i]["fluency"] = weighted_ngram_entropy(texts_[i]);
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

  /// Readers make a neighbourhood prompt of a probe whose answer is the old one: it counts once.
  static bool brings(const datasets::Fact& fact, const std::string& prompt) {
    const auto probes = fact.locality.find("neighborhood");
    return probes != fact.locality.end() && std::ranges::any_of(probes->second, [&](const datasets::Probe& probe) {
             return probe.prompt == prompt && !probe.answers.empty() && probe.answers[0] == *fact.target_true;
           });
  }

  static std::optional<double> mean_accuracy(const ScoreSheet& sheet, const std::vector<size_t>& numbers) {
    std::vector<double> values;
    for (size_t number : numbers) values.push_back(sheet.at(number).token_accuracy());
    return record_mean(values);
  }

  /// Predictions are kept in the case so that a later evaluation can compare with them.
  static void put_locality(const MetricContext& context, const ScoreSheet& sheet, const Record& record, size_t i,
                           json& row) {
    row["locality"] = json::object();
    row["locality_predictions"] = json::object();
    for (const auto& [key, numbers] : record.locality) {
      json predictions = json::array();
      for (size_t number : numbers) predictions.push_back(sheet.at(number).predicted);
      if (const json before = predictions_before(context, i, key); !before.is_null())
        row["locality"][key + "_acc"] = share_equal(before, predictions);
      row["locality_predictions"][key] = std::move(predictions);
    }
  }

  static json predictions_before(const MetricContext& context, size_t i, const std::string& key) {
    const Evaluation* before = context.options.before;
    if (!before || i >= before->cases.size()) return nullptr;
    return detail::member(before->cases[i], {"easyedit", "locality_predictions", key});
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

  std::vector<Record> records_;
  std::vector<std::string> texts_;  // of each fact that was observed, in their order
};

}  // namespace

std::unique_ptr<Metric> make_easyedit() {
  return std::make_unique<EasyEdit>();
}

}  // namespace emend::evaluation
