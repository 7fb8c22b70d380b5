// What a metric family is: the interface behind metrics.def.
//
// To add one: write metrics/<name>.cpp with a class derived from Metric and a function make_<name>, and add the line
// EMEND_METRIC(<name>) to metrics.def. A family declares its columns and what counts as success (MetricInfo) and makes
// raw values for each case; the summary is made from both. Help, resolution of "auto", evaluation, reports, comparisons
// and the conformance test follow.
#pragma once

#include <emend/evaluation/evaluation.h>

#include <memory>

namespace emend::evaluation {

/// The continuations that all families need, gathered first and scored together.
class ScoreSheet {
 public:
  Front front = {};  ///< of every prompt
  /// Asks for prompt + " " + target on behalf of case `fact`; returns the number under which the score will be found.
  /// `question`: what of the prompt is asked, where it stands behind examples; empty: all of it.
  size_t add(size_t fact, const std::string& prompt, std::string target, std::string_view question = {});
  /// Only once the scores are there.
  [[nodiscard]] const Score& at(size_t number) const { return scores_.at(number); }
  [[nodiscard]] size_t size() const noexcept { return requests_.size(); }

  [[nodiscard]] const std::vector<ScoreRequest>& requests() const noexcept { return requests_; }
  [[nodiscard]] const std::vector<size_t>& cases() const noexcept { return cases_; }
  void fill(std::vector<Score> scores);  ///< in the order of requests()

 private:
  std::vector<ScoreRequest> requests_;
  std::vector<size_t> cases_;
  std::vector<Score> scores_;
};

struct MetricContext {
  const datasets::FactSet& facts;
  const EvaluateOptions& options;
  const models::Model* model = nullptr;  ///< null in tests of families that only read scores
};

struct MetricOutcome {
  nlohmann::json summary = nlohmann::json::object();  ///< finish() adds the declared columns
  std::vector<nlohmann::json> cases;                  ///< one a fact, or empty
  std::vector<nlohmann::json> groups;                 ///< one a group, or empty
  std::map<std::string, at::Tensor> kept;             ///< for the evaluation of the edited model: Evaluation::kept
};

/// One evaluation by one family: plan(), then finish() on the same object.
class Metric {
 public:
  virtual ~Metric() = default;
  [[nodiscard]] virtual const MetricInfo& info() const = 0;  ///< name, protocol and fields
  /// Whether "auto" chooses it for these facts; of none, it is measured only when asked for.
  [[nodiscard]] virtual bool suits(const datasets::FactSet&) const { return false; }
  /// Adds what it needs to the sheet.
  virtual void plan(const MetricContext& context, ScoreSheet& sheet) = 0;
  /// Lets the model itself write or predict for the facts [begin, end), whose edits it holds. Called for all facts at
  /// once, or fact by fact in their order where each is judged on a state of the model of its own.
  virtual void observe(const models::Model&, const MetricContext&, size_t /*begin*/, size_t /*end*/) {}
  /// Turns scores into raw values, and these into the declared columns of the summary.
  [[nodiscard]] MetricOutcome finish(const MetricContext& context, const ScoreSheet& sheet);
  /// Options that change its numbers, for cache keys.
  [[nodiscard]] virtual nlohmann::json key(const EvaluateOptions&) const { return nullptr; }

 protected:
  /// The raw values of each case; may run the model itself (generation).
  [[nodiscard]] virtual MetricOutcome measure(const MetricContext& context, const ScoreSheet& sheet) = 0;
  /// Adds the declared columns of the outcome's cases and groups to its summary.
  void summarise(const MetricContext& context, MetricOutcome& outcome) const;
};

/// A new object of the family. Throws Error(kInvalidArgument) with the closest name.
[[nodiscard]] std::unique_ptr<Metric> make_metric(const std::string& name);

/// Mean of a record's values; absent if there are none.
[[nodiscard]] std::optional<double> record_mean(const std::vector<double>& values);

// Fields that differ from most.
[[nodiscard]] MetricField difference(MetricField field);  ///< of two shares
[[nodiscard]] MetricField of_groups(MetricField field);   ///< instead of cases
[[nodiscard]] MetricField optional(MetricField field);    ///< left out of a summary in which nothing has it
/// "score", in percent.
[[nodiscard]] MetricField harmonic_score(std::string definition, std::vector<std::string> columns);

// Readers of raw values for MetricField::of_case.
[[nodiscard]] CaseFigure value_of(std::string key);       ///< a number, or a truth value as 1 or 0
[[nodiscard]] CaseFigure share_of_true(std::string key);  ///< in a list of truth values
[[nodiscard]] CaseFigure mean_of_keys(std::string key);   ///< over the numbers of an object
/// A verdict by the share of the target's tokens that the model says; none without a share.
[[nodiscard]] CaseVerdict said_in_full(const std::optional<double>& share);

}  // namespace emend::evaluation
