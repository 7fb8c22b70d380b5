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

class EasyEdit final : public Metric {
 public:
  using Metric::Metric;
  [[nodiscard]] bool suits(const datasets::FactSet& facts) const override {
    return !facts.facts.empty() && facts.format != "mquake";
  }

  void plan(const MetricContext& context, ScoreSheet& sheet) override {
    const auto& facts = context.facts.facts;
    outcome_.cases.resize(facts.size());
    accuracies_.resize(facts.size());
    for (size_t i = 0; i < facts.size(); ++i) {
      const auto& fact = facts[i];
      json& row = outcome_.cases[i];
      row["locality"] = row["portability"] = json::object();
      json &rewrite = row["rewrite_acc"], &predictions = row["locality_predictions"] = json::object();
      auto& accuracies = accuracies_[i];
      sheet.add(i, fact.full_prompt(), fact.target_new,
                [&rewrite](const Score& score) { rewrite = score.token_accuracy(); });
      for (const auto& prompt : fact.paraphrase_prompts)
        sheet.add(i, prompt, fact.target_new,
                  [&list = accuracies.rephrase](const Score& score) { list.push_back(score.token_accuracy()); });
      // Predictions are kept in the case so that a later evaluation can compare with them.
      const auto keep = [&](const std::string& key, const std::string& prompt, const std::string& answer) {
        sheet.add(i, prompt, answer,
                  [&list = predictions[key]](const Score& score) { list.push_back(score.predicted); });
      };
      if (fact.target_true)
        for (const auto& prompt : fact.neighborhood_prompts)
          if (!brings(fact, prompt)) keep("neighborhood", prompt, *fact.target_true);
      for (const auto& [key, list] : fact.locality)
        for (const auto& probe : list)
          if (!probe.answers.empty()) keep(key, probe.prompt, probe.answers[0]);
      for (const auto& [key, list] : fact.portability)
        for (const auto& probe : list)
          if (!probe.answers.empty())
            sheet.add(i, probe.prompt, probe.answers[0], [&list = accuracies.portability[key]](const Score& score) {
              list.push_back(score.token_accuracy());
            });
    }
  }

  void observe(const models::Model& model, const MetricContext& context, size_t begin, size_t end) override {
    if (!context.options.generation) return;
    std::vector<std::string> prompts;
    for (size_t i = begin; i < end; ++i) prompts.push_back(context.options.asked(context.facts.facts[i].full_prompt()));
    for (auto& text : detail::generate_texts(model, prompts, context.options, begin)) texts_.push_back(std::move(text));
  }

  void measure(const MetricContext& context) override {
    for (size_t i = 0; i < accuracies_.size(); ++i) {
      json& row = outcome_.cases[i];
      row["rephrase_acc"] = detail::or_null(record_mean(accuracies_[i].rephrase));
      for (const auto& [key, values] : accuracies_[i].portability)
        row["portability"][key + "_acc"] = *record_mean(values);
      for (const auto& [key, predictions] : row["locality_predictions"].items())
        if (const json before = predictions_before(context, i, key); !before.is_null())
          row["locality"][key + "_acc"] = share_equal(before, predictions);
    }
    for (size_t i = 0; i < texts_.size(); ++i) outcome_.cases[i]["fluency"] = weighted_ngram_entropy(texts_[i]);
  }

  [[nodiscard]] json key(const EvaluateOptions& options) const override {
    return options.generation ? json{options.generation_length, options.seed} : json();
  }

 private:
  /// Of one fact.
  struct Accuracies {
    std::vector<double> rephrase;
    std::map<std::string, std::vector<double>> portability;
  };

  /// Readers make a neighbourhood prompt of a probe whose answer is the old one: it counts once.
  static bool brings(const datasets::Fact& fact, const std::string& prompt) {
    const auto probes = fact.locality.find("neighborhood");
    return probes != fact.locality.end() && std::ranges::any_of(probes->second, [&](const datasets::Probe& probe) {
             return probe.prompt == prompt && !probe.answers.empty() && probe.answers[0] == *fact.target_true;
           });
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

  std::vector<Accuracies> accuracies_;
  std::vector<std::string> texts_;  // of each fact that was observed, in their order
};

}  // namespace

MetricInfo make_easyedit() {
  return {
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
      made<EasyEdit>,
      [](const json& raw) { return said_in_full(value_of("rewrite_acc")(raw)); },
      /*keyed=*/{"locality", "portability"}};
}

}  // namespace emend::evaluation
