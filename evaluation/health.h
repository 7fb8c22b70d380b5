// Is the model still a good language model? Perplexity, last-word prediction, multiple choice, and divergence from the
// unedited model.
#pragma once

#include <emend/evaluation/scoring.h>
#include <emend/models/model.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace emend::evaluation {

struct Perplexity {
  double value = 0;  ///< exp(mean -log p over the predicted tokens)
  int64_t tokens = 0;
};

/// Perplexity of a text cut into windows of `length` tokens that do not overlap (each starts without context; the
/// tokenizer's beginning-of-sequence token is put in front of every window where it adds one). At most `max_tokens` are
/// read (-1: all).
[[nodiscard]] Perplexity perplexity(const models::Model& model, const std::string& text, int64_t length = 512,
                                    int64_t max_tokens = -1, const ScoreOptions& options = {});

struct Lambada {
  double accuracy = 0;    ///< % of texts whose last word is the greedy continuation
  double perplexity = 0;  ///< exp(mean over texts of -log p(last word))
  int64_t n = 0;
};
/// Texts whose last word (after the last space, without white space behind it) is the target.
[[nodiscard]] Lambada lambada(const models::Model& model, const std::vector<std::string>& texts,
                              const ScoreOptions& options = {});

/// A question with several continuations of which one is right.
struct Choice {
  std::string prompt;
  std::vector<std::string> options;
  int64_t answer = 0;
};
struct MultipleChoice {
  double accuracy = 0;             ///< %, by the sum of log-probabilities
  double accuracy_normalised = 0;  ///< %, by the sum divided by the option's characters
  std::optional<double> matthews;  ///< Matthews correlation × 100, for two-option tasks
  int64_t n = 0;
  std::vector<int64_t> chosen;  ///< by the sum
};
[[nodiscard]] MultipleChoice multiple_choice(const models::Model& model, const std::vector<Choice>& items,
                                             const ScoreOptions& options = {});

/// KL(before ‖ after) of each row in nat, float64; both [texts, V] as next_token_log_probs gives them.
/// Throws Error(kInvalidArgument) if their shapes differ.
[[nodiscard]] at::Tensor divergences(const at::Tensor& before, const at::Tensor& after);
/// Its mean over rows, not below 0; no number where one of the distributions has none.
[[nodiscard]] double mean_divergence(const at::Tensor& before, const at::Tensor& after);

/// One task read from a file.
struct HealthTask {
  std::string name;  ///< "mmlu", "piqa", "sst2", "rte", "cola", "lambada", "perplexity"
  std::string file;
  std::vector<Choice> choices;
  std::vector<std::string> texts;  ///< for lambada: texts; for perplexity: one text
};

/// The tasks whose files lie in `folder`, by file name: health_mmlu.json, health_piqa.json, health_sst2.json,
/// health_rte.json, health_cola.json, lambada*.jsonl, wikitext*.txt or perplexity*.txt. `limit` items each (-1: all).
/// Throws Error(kNotFound) if there is none, Error(kCorruption, kInvalidArgument) naming file and row.
[[nodiscard]] std::vector<HealthTask> load_health_tasks(const std::filesystem::path& folder, int64_t limit = 100);

/// Prompts for divergence: a fixed set of beginnings of sentences that have nothing to do with the facts.
[[nodiscard]] const std::vector<std::string>& probe_prompts();

/// {"perplexity": …, "lambada_accuracy": …, "lambada_perplexity": …, "mmlu_accuracy": …, …, "n": {task: items}}
[[nodiscard]] nlohmann::json evaluate_health(const models::Model& model, const std::vector<HealthTask>& tasks,
                                             const ScoreOptions& options = {});

}  // namespace emend::evaluation
