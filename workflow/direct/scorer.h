// How answers are scored: by their words, by what the model would say next, by the model itself, by a command.
#pragma once

#include <emend/workflow/direct/directions.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace emend::workflow {

/// What is scored: answers to prompts, and a model as it is now.
struct Answers {
  std::vector<std::string> texts;
  std::vector<ContrastPrompt> prompts = {};
  const models::Model* model = nullptr;  ///< asked by "next" and "judge"
  bool chat = true;
  Handles lent = {};
};

/// A number for a set of answers.
struct Scorer {
  std::string name;
  /// "rate": occurrences of the words in 100 words of text. "any": percent of the texts that hold one of them.
  /// "length": words a text. "loops": percent of the texts in which a phrase goes round. "entropy": of 2- and 3-grams,
  /// in bits. "sentiment": occurrences of the words less those of `against`, in 100 words of text. "next": percent of
  /// probability that the model's answers begin with one of the words; the texts do not count. "judge": percent of
  /// probability of `words` against `against` where the model is asked `ask`. "command": mean of the numbers that the
  /// command `words` gives.
  std::string kind = "rate";
  /// Or phrases; compared without case and punctuation (also the typographer's and that of CJK), as whole words; two
  /// spellings of one word count once. Those of "next" and "judge" as the tokens that go on from the prompt.
  std::vector<std::string> words = {};
  std::vector<std::string> against = {};
  std::string ask = {};  ///< with {prompt} and {answer}

  /// 0 without texts. Throws Error(kNotFound) or Error(kCorruption) for a command that is not there, fails, or gives
  /// anything but a number an answer.
  [[nodiscard]] double score(const Answers& answers) const;
  /// What no set of texts can score better than, higher being better with `raise`; none where there is no such number.
  [[nodiscard]] std::optional<double> best(bool raise) const;
  /// "any": whether every text that goes on from this one holds one of the words. The last word may still grow.
  [[nodiscard]] bool counts(const std::string& text) const;
  /// Whether it depends on the changed model itself; the others read texts, and a judge is the model as it was.
  [[nodiscard]] bool reads_model() const { return kind == "next"; }
  [[nodiscard]] nlohmann::json to_json() const { return {name, kind, words, against, ask}; }
};
/// {"name": "…", "kind": "rate|any", "words": ["…"]}, "length", "loops" and "entropy" without a list, "sentiment" with
/// "positive" and "negative", "next" with "words", "judge" with "ask" (and "yes", "no"), "command" with "command":
/// ["…"]. A command is run: read only files that the user has named. Throws Error(kCorruption) naming file and member.
[[nodiscard]] Scorer read_scorer(const std::filesystem::path& path);
[[nodiscard]] Scorer scorer_of(const nlohmann::json& object, const std::string& where);

/// What came into each layer in every pass of a reading, so that another one of the same rows, after a change of later
/// layers alone, begins with `first_layer`.
struct LayerInputs {
  int first_layer = 0;
  std::vector<std::vector<at::Tensor>> passes = {};  ///< empty: the next reading writes them down
};
/// Log-probabilities of the token behind each row's last `last` ones, [rows · last, V] float32 on the host.
[[nodiscard]] at::Tensor next_log_probs(const models::Model& model, const std::vector<std::vector<int64_t>>& rows,
                                        const Handles& lent = {}, int64_t last = 1, LayerInputs* inputs = nullptr);

}  // namespace emend::workflow
