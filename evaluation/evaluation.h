// Judging a model by a set of facts: one call for any number of metric families.
//
// A family is one file in metrics/ and one line in metrics.def. It first says which continuations it needs scored, then
// turns the scores into numbers; requests of all families and all facts go through the model together (scoring.h).
//
// Goals: both published dialects (CounterFact's success rates, EasyEdit's token accuracies) from one pass, each number
// with its definition; a number that the facts do not support is null, never 0. Non-goals: deciding when to evaluate,
// editing.
#pragma once

#include <emend/core/cancel.h>
#include <emend/core/log.h>
#include <emend/datasets/fact.h>
#include <emend/evaluation/scoring.h>
#include <emend/evaluation/statistics.h>
#include <emend/models/model.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace emend::evaluation {

class Metric;

/// The one comparison behind every "success": `right` is the more probable of two answers (mean negative
/// log-likelihood per token, strictly).
[[nodiscard]] inline bool more_probable(double nll_right, double nll_wrong) {
  return nll_right < nll_wrong;
}

/// What one case is worth in a figure, from the family's raw values of the case as cases.jsonl holds them. Absent where
/// the case has none; damaged values count as missing.
using CaseFigure = std::function<std::optional<double>(const nlohmann::json& raw)>;

/// One column of a metric family. Evaluation, reports and comparisons know of a figure what is declared here.
struct MetricField {
  std::string key;         ///< as in results.json: "efficacy_success"
  std::string paper_name;  ///< "ES"
  std::string definition;  ///< one or two sentences
  std::string unit;        ///< "%", "bit × 100", "nat"
  bool higher_is_better = true;
  CaseFigure of_case = {};                    ///< the figure is `scale` times its mean; none: the family fills it in
  std::string label = "";                     ///< in charts and in the table of every edit; empty: not there
  double scale = 100;                         ///< from a case's value to the figure
  std::vector<std::string> harmonic_of = {};  ///< the figure is the harmonic mean of these columns
  bool of_groups = false;                     ///< `of_case` reads groups of facts instead of cases
  bool optional = false;                      ///< without a value left out of the summary instead of null
  bool difference = false;                    ///< of two shares: from -100 to 100 %
  [[nodiscard]] bool share() const { return unit == "%" && !difference; }  ///< of records: from 0 to 100 %
  /// What a mean of records can be, before `scale`: 0 to 1 of shares, -1 to 1 of their differences, 0 and more of
  /// others.
  [[nodiscard]] Interval limits() const;
  [[nodiscard]] int digits() const;  ///< that people need behind the point
};

/// What a family says about one case.
struct CaseVerdict {
  std::optional<double> p_new;  ///< probability of the new answer after the fact's own prompt
  std::optional<bool> success;  ///< absent: the case has nothing that the family could judge
  std::string reason;           ///< why there is no success, in words
};

struct MetricInfo {
  std::string name;      ///< as on the command line and in metrics.def
  std::string summary;   ///< one line for lists and help
  std::string protocol;  ///< where the definition comes from
  int version = 1;       ///< goes up when numbers change; part of cache keys
  std::vector<MetricField> fields;
  std::unique_ptr<Metric> (*make)(const MetricInfo& info) = nullptr;  ///< an object for one evaluation (metric.h)
  std::function<CaseVerdict(const nlohmann::json& raw)> judge = {};   ///< what makes a case a success; none: no opinion
  std::vector<std::string> keyed = {};  ///< members that hold figures in percent under the facts' own keys: "locality"
  bool alone = true;                    ///< can judge a fact on a state of the model of its own
  bool memit_names = false;             ///< raw values are named as in the MEMIT repository's case files
  /// The column of this key; null without one.
  [[nodiscard]] const MetricField* field(std::string_view key) const;
};

/// The family's raw values of a line of cases.jsonl, `when` "pre" or "post"; null if absent.
[[nodiscard]] const nlohmann::json& case_metrics(const nlohmann::json& line, const std::string& when,
                                                 const std::string& family);
/// The verdicts of all families together: each member from the first family that has it.
[[nodiscard]] CaseVerdict judge_case(const nlohmann::json& line, const std::string& when);

/// The families of metrics.def, in its order.
[[nodiscard]] const std::vector<MetricInfo>& metric_families();
/// Throws Error(kInvalidArgument) with the closest name.
[[nodiscard]] const MetricInfo& metric_info(const std::string& name);

/// Resolves names as given to --eval: "auto" becomes the families that suit the facts (by what the facts carry, so a
/// CounterFact file gives counterfact and easyedit), "none" becomes nothing; duplicates go. Throws
/// Error(kInvalidArgument) for an unknown name with the closest one.
[[nodiscard]] std::vector<std::string> resolve_metrics(const std::vector<std::string>& names,
                                                       const datasets::FactSet& facts);

/// The outcome for one model state. `summary` has a member for each family: {"counterfact": {"score": 85.8, …, "n":
/// 32}}; percentages are 0…100. `cases` has an object for each fact with the family's raw values: {"counterfact": {…}};
/// families that judge groups of facts (mquake) add `groups`.
struct Evaluation {
  nlohmann::json summary = nlohmann::json::object();
  std::vector<nlohmann::json> cases;
  std::vector<nlohmann::json> groups;
  /// What families compare with later, "family.what": next-token log-probabilities [texts, V].
  std::map<std::string, at::Tensor> kept;
  std::string facts = {};  ///< hash of the questions that were asked; empty: not known
};

/// What stands in front of a prompt that the model is asked (editors::RuntimeScope::prefix). Empty: nothing.
using Front = std::function<std::string(std::string_view prompt)>;

struct EvaluateOptions {
  int64_t batch_tokens = 2048;
  Front front = {};  ///< of everything that is asked
  /// The evaluation of the unedited model on the same facts with the same families; locality in EasyEdit's sense and
  /// the divergence in `health` compare with it. Absent: the model is taken to be unedited.
  const Evaluation* before = nullptr;
  bool reference = false;  ///< the published padded loop instead of the packed engine (same numbers, slow)

  // Generation (slow): fluency, consistency, essence; family "generation" or `fluency` in easyedit.
  bool generation = false;
  int64_t generation_length = 100;        ///< tokens, prompt included, as published
  std::filesystem::path snippets = {};    ///< attribute_snippets.json; empty: no reference score
  std::filesystem::path idf_corpus = {};  ///< texts for inverse document frequencies; empty: the snippets themselves
  uint64_t seed = 0;

  /// Folder with health_*.json, lambada*.jsonl, *.txt for the family "health".
  std::filesystem::path health_data = {};
  int64_t health_limit = 100;  ///< items of each health task; -1: all

  /// Processes with the same model and facts that share the scoring and the generation of texts; all get the outcome.
  devices::WorkSharing sharing = {};

  int64_t free_limit = 100;  ///< facts whose text the family "free" has written, from the first; -1: all
  /// How it asks: "plain", a prompt is continued; "chat", a message is answered in the model's chat template; "both".
  std::string free_style = "plain";

  int bootstrap = 1000;      ///< resamples for the score's interval; 0: none
  ProgressFn progress = {};  ///< phase "evaluate"
  CancelToken cancel = {};
  Log log = {};

  /// What `before` has kept under this name; null without it.
  [[nodiscard]] const at::Tensor* kept_before(const std::string& name) const {
    if (!before) return nullptr;
    const auto found = before->kept.find(name);
    return found == before->kept.end() ? nullptr : &found->second;
  }
  [[nodiscard]] std::string asked(const std::string& prompt) const { return front ? front(prompt) + prompt : prompt; }
  [[nodiscard]] ScoreOptions scoring() const {
    return {.batch_tokens = batch_tokens, .progress = progress, .cancel = cancel, .sharing = sharing};
  }
};

/// Evaluates `model` on `facts`. Names as resolve_metrics takes them. The model is not changed.
/// Throws Error(kInvalidArgument) for names and for a `before` of other facts, Error(kNotFound) for data that a family
/// needs, Error(kNumeric) if the model gives values that are not finite, Error(kCancelled).
[[nodiscard]] Evaluation evaluate(const models::Model& model, const datasets::FactSet& facts,
                                  const std::vector<std::string>& names, const EvaluateOptions& options = {});

/// The same for a model that has not been edited, remembered in "evaluations" of the folder `cache` (created if
/// missing; empty: not remembered). The key holds the fingerprint of the weights as they are and their dtype, the
/// facts' fingerprint, the families with their versions and every option that changes a number. A damaged file is
/// reported through the log and replaced.
[[nodiscard]] Evaluation evaluate_before(const models::Model& model, const datasets::FactSet& facts,
                                         const std::vector<std::string>& names, const EvaluateOptions& options,
                                         const std::filesystem::path& cache, bool* from_cache = nullptr);

/// What the model says to one fact's own prompt.
struct Efficacy {
  double nll_new = 0;              ///< mean per-token negative log-likelihood of target_new
  std::optional<double> nll_true;  ///< of target_true, where the fact has one
  bool accurate = false;           ///< every token of target_new is the argmax
  double probability = 0;          ///< of the whole answer: the product over its tokens
  /// nll_true > nll_new, or `accurate` where there is no target_true.
  [[nodiscard]] bool success() const { return nll_true ? more_probable(nll_new, *nll_true) : accurate; }
};

/// The facts with that text in front of their own prompts, for the functions below, which ask nothing else.
[[nodiscard]] datasets::FactSet asked(datasets::FactSet facts, const Front& front);

/// The share of successes among `values`, as the family counterfact counts it: where `compared`, facts without an old
/// answer are left out; otherwise no fact of the run has one, and it is the share of `accurate`. Absent without a fact.
[[nodiscard]] std::optional<Mean> success_share(std::span<const Efficacy> values, bool compared);
/// Whether one of them has an old answer.
[[nodiscard]] bool any_compared(std::span<const Efficacy> values);

/// The cheap path for retention and stop rules: the facts' own prompts only.
[[nodiscard]] std::vector<Efficacy> evaluate_efficacy(const models::Model& model,
                                                      const std::vector<datasets::Fact>& facts,
                                                      const ScoreOptions& options = {});

/// Greedy continuations (of `new_tokens`, and no fewer than the longest answer and four) and target probabilities of
/// the facts' own prompts, for people to read; "…" ends one that is cut there. `before`: of the same facts by the
/// unedited model, from the first on, or none; they save time and change nothing.
struct Continuation {
  std::string prompt, text;
  double probability = 0;  ///< of the whole target: the product over its tokens
};
[[nodiscard]] std::vector<Continuation> continue_facts(const models::Model& model,
                                                       const std::vector<datasets::Fact>& facts,
                                                       int64_t new_tokens = 12, const CancelToken& cancel = {},
                                                       std::span<const Continuation> before = {});

/// Efficacy of every fact after every step of a sequence of edits.
class RetentionMatrix {
 public:
  RetentionMatrix();
  /// Records the state after `edits_applied` edits; `values` covers the facts in their order (those not yet edited
  /// too).
  void add(int64_t edits_applied, const std::vector<Efficacy>& values);
  [[nodiscard]] bool empty() const { return steps_.at("edits_applied").empty(); }
  /// Of the last state; 0 without one.
  [[nodiscard]] int64_t edits() const { return empty() ? 0 : steps_.at("edits_applied").back().get<int64_t>(); }
  /// Drops the states after more than `edits_applied` edits.
  void cut(int64_t edits_applied);
  /// {"edits_applied": [...], "success": [[0/1 …] …], "accuracy": [[…] …], "probability": [[…] …],
  ///  "edited_success": [% of the facts edited so far, by success_share …]} — one row a step.
  [[nodiscard]] const nlohmann::json& to_json() const noexcept { return steps_; }
  [[nodiscard]] static RetentionMatrix from_json(const nlohmann::json& json);

 private:
  nlohmann::json steps_;
};

}  // namespace emend::evaluation
