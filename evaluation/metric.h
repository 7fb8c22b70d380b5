// What a metric family is: the interface behind metrics.def.
//
// To add one: write metrics/<name>.cpp with a class derived from Metric and a function make_<name> that returns its
// MetricInfo, and add the line EMEND_METRIC(<name>) to metrics.def. A family declares its columns and what counts as
// success, and makes raw values for each case; the summary is made from both. Help, resolution of "auto", evaluation,
// reports, comparisons and the conformance test follow.
#pragma once

#include <emend/evaluation/evaluation.h>

#include <memory>

namespace emend::evaluation {

/// The continuations that all families need, gathered first and scored together.
class ScoreSheet {
 public:
  using Read = std::function<void(const Score& score)>;

  Front front = {};  ///< of every prompt
  /// Asks for prompt + " " + target on behalf of case `fact`; `read` gets the score, after those that were asked for
  /// before. `question`: what of the prompt is asked, where it stands behind examples; empty: all of it.
  void add(size_t fact, const std::string& prompt, std::string target, Read read, std::string_view question = {});
  [[nodiscard]] const std::vector<ScoreRequest>& requests() const noexcept { return requests_; }
  [[nodiscard]] const std::vector<size_t>& cases() const noexcept { return cases_; }  ///< of each request
  void fill(const std::vector<Score>& scores) const;  ///< one a request: hands them to those that asked

 private:
  std::vector<ScoreRequest> requests_;
  std::vector<size_t> cases_;
  std::vector<Read> reads_;
};

struct MetricContext {
  const datasets::FactSet& facts;
  const EvaluateOptions& options;
  /// That judges all facts; null where each is judged on its own, and in tests of scores.
  const models::Model* model = nullptr;
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
  explicit Metric(const MetricInfo& info) : info_(info) {}
  virtual ~Metric() = default;
  [[nodiscard]] const MetricInfo& info() const noexcept { return info_; }
  /// Whether "auto" chooses it for these facts; of none, it is measured only when asked for.
  [[nodiscard]] virtual bool suits(const datasets::FactSet&) const { return false; }
  /// Adds what it needs to the sheet, with readers that put raw values into `outcome_`.
  virtual void plan(const MetricContext& context, ScoreSheet& sheet) = 0;
  /// Lets the model itself write or predict for the facts [begin, end), whose edits it holds. Called for all facts at
  /// once, or fact by fact in their order where each is judged on a state of the model of its own.
  virtual void observe(const models::Model&, const MetricContext&, size_t /*begin*/, size_t /*end*/) {}
  /// Once the scores are read: turns raw values into the declared columns of the summary.
  [[nodiscard]] MetricOutcome finish(const MetricContext& context);
  /// Options that change its numbers, for cache keys.
  [[nodiscard]] virtual nlohmann::json key(const EvaluateOptions&) const { return nullptr; }

 protected:
  /// The raw values that are no single score; may run the model itself (generation).
  virtual void measure(const MetricContext&) {}
  /// Adds the declared columns of the outcome's cases and groups to its summary.
  void summarise(const MetricContext& context, MetricOutcome& outcome) const;

  MetricOutcome outcome_;

 private:
  const MetricInfo& info_;
};

/// A new object of the family. Throws Error(kInvalidArgument) with the closest name.
[[nodiscard]] std::unique_ptr<Metric> make_metric(const std::string& name);
/// For MetricInfo::make.
template <class Family>
[[nodiscard]] std::unique_ptr<Metric> made(const MetricInfo& info) {
  return std::make_unique<Family>(info);
}

/// An evaluation in steps, for facts that are judged on their own states of the model: each was edited from the
/// unedited model, alone, and taken back (EasyEdit's `sequential_edit=False`, ROME's evaluation). The numbers are put
/// together as evaluate() does, which is one step. `facts` must outlive the object.
class Judging {
 public:
  /// `model`: the one that judges all facts; null where every fact has its own.
  Judging(const datasets::FactSet& facts, const std::vector<std::string>& names, const EvaluateOptions& options,
          const models::Model* model = nullptr);
  Judging(const Judging&) = delete;
  /// Throws Error(kInvalidArgument) for families that judge the model or groups of facts: generation, health, mquake.
  static void require_separate(const std::vector<std::string>& families);
  /// Scores the facts [begin, end) on the model as it is now.
  void judge(const models::Model& model, size_t begin, size_t end);
  /// Call once, after every fact has been judged.
  [[nodiscard]] Evaluation finish();

 private:
  EvaluateOptions options_;
  MetricContext context_;
  std::vector<std::unique_ptr<Metric>> metrics_;
  ScoreSheet sheet_;
  std::vector<Score> scores_;
};

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
