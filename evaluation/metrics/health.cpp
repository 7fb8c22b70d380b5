// Is the model still a good language model? Perplexity, last-word prediction, multiple choice (health.h), and the
// divergence of its next-token distributions on sentences that have nothing to do with the facts from those of the
// unedited model.
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/evaluation/detail/generation.h>
#include <emend/evaluation/health.h>
#include <emend/evaluation/metric.h>
#include <emend/evaluation/statistics.h>

namespace emend::evaluation {
namespace {

using nlohmann::json;

class Health final : public Metric {
 public:
  using Metric::Metric;

  void plan(const MetricContext& context, ScoreSheet&) override {
    if (context.options.health_data.empty())
      throw Error(ErrorClass::kNotFound,
                  {"metric \"health\"", "no folder with its data", "a folder with health_*.json, lambada*.jsonl, *.txt",
                   "name one with " + setting("health_data")});
    tasks_ = load_health_tasks(context.options.health_data, context.options.health_limit);
  }

  void measure(const MetricContext& context) override {
    EMEND_CHECK(context.model != nullptr, "health needs a model");
    ScoreOptions options = context.options.scoring();
    options.phase = "health";
    json& summary = outcome_.summary = evaluate_health(*context.model, tasks_, options);
    note_counts(summary);
    summary["n"] = tasks_.size();
    const at::Tensor& probe = outcome_.kept["health"] = next_token_log_probs(*context.model, probe_prompts(), options);
    summary["divergence"] = nullptr;
    if (const at::Tensor* before = context.options.kept_before("health"))
      summary["divergence"] = mean_divergence(*before, probe);
  }

  [[nodiscard]] json key(const EvaluateOptions& options) const override {
    json files = json::array();
    for (const auto& task : load_health_tasks(options.health_data, options.health_limit))
      files.push_back(detail::file_key(task.file));
    return {files, options.health_limit};
  }

 private:
  // Items of each figure's task, and the intervals of shares.
  void note_counts(json& summary) const {
    for (const auto& figure : info().fields) {
      const std::string task = figure.key.substr(0, figure.key.find('_'));
      if (!summary.contains(figure.key) || !summary["n"].contains(task)) continue;
      const auto n = summary["n"][task].get<int64_t>();
      summary["counts"][figure.key] = n;
      if (figure.unit != "%") continue;
      const auto [low, high] = share_interval(summary[figure.key].get<double>() / 100, n);
      summary["ci95"][figure.key] = {100 * low, 100 * high};
    }
    summary["counts"]["divergence"] = probe_prompts().size();
  }

  std::vector<HealthTask> tasks_;
};

}  // namespace

MetricInfo make_health() {
  return {"health",
          "perplexity, LAMBADA, MMLU, PIQA, SST-2, RTE, CoLA from files, and divergence from the unedited model",
          "zero-shot, wordings of lm-evaluation-harness",
          2,
          {
              {"divergence", "KL",
               "Mean Kullback-Leibler divergence of next-token distributions, unedited relative to edited, on 32 "
               "beginnings of unrelated sentences.",
               "nat", false},
              {"perplexity", "PPL", "Perplexity of a text's first 8,192 tokens, in windows of up to 512.", "perplexity",
               false},
              {"lambada_accuracy", "LAMBADA", "Texts whose last word is the greedy continuation.", "%", true},
              {"lambada_perplexity", "LAMBADA PPL", "Perplexity of the last word.", "perplexity", false},
              {"mmlu_accuracy", "MMLU", "Questions whose right letter is the most probable of the letters.", "%", true},
              {"piqa_accuracy", "PIQA", "Questions whose right solution is the more probable one.", "%", true},
              {"piqa_accuracy_normalised", "PIQA norm",
               "The same with log-probabilities divided by the solutions' characters.", "%", true},
              {"sst2_accuracy", "SST-2", "Sentences whose sentiment is named rightly.", "%", true},
              {"rte_accuracy", "RTE", "Pairs whose entailment is named rightly.", "%", true},
              {"cola_accuracy", "CoLA", "Sentences whose acceptability is named rightly.", "%", true},
              {"cola_matthews", "CoLA MCC", "Matthews correlation of the same.", "× 100", true},
          },
          made<Health>,
          /*judge=*/{},
          /*keyed=*/{},
          /*alone=*/false};
}

}  // namespace emend::evaluation
