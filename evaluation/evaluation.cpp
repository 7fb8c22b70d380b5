#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/metric.h>

#include <chrono>
#include <cmath>

namespace emend::evaluation {
namespace {

using nlohmann::json;

/// The published loop works case by case; within a case every text is scored once.
std::vector<Score> score_reference(const models::Model& model, const ScoreSheet& sheet, const ScoreOptions& options,
                                   ScoreCounts& counts) {
  std::vector<std::vector<ScoreRequest>> cases;
  std::map<size_t, size_t> case_of;
  std::vector<std::pair<size_t, size_t>> place;
  std::vector<std::map<ScoreRequest, size_t>> seen;
  for (size_t i = 0; i < sheet.size(); ++i) {
    const auto [at, is_new] = case_of.emplace(sheet.cases()[i], cases.size());
    if (is_new) cases.emplace_back(), seen.emplace_back();
    const auto [row, is_new_row] = seen[at->second].emplace(sheet.requests()[i], cases[at->second].size());
    if (is_new_row) cases[at->second].push_back(sheet.requests()[i]);
    place.emplace_back(at->second, row->second);
  }
  const auto scores = score_cases_reference(model, cases, options);
  std::vector<Score> flat;
  for (const auto& [c, r] : place) flat.push_back(scores[c][r]);
  counts.requests = static_cast<int64_t>(sheet.size());
  return flat;
}

/// The families of one evaluation with what they asked for.
struct Plan {
  Plan(const MetricContext& context, const std::vector<std::string>& names) {
    for (const auto& name : names) {
      metrics.push_back(make_metric(name));
      metrics.back()->plan(context, sheet);
    }
  }

  void observe(const models::Model& model, const MetricContext& context, size_t begin, size_t end) {
    for (const auto& metric : metrics) metric->observe(model, context, begin, end);
  }

  /// Turns the scores of the filled sheet into numbers.
  void finish(const MetricContext& context, Evaluation& evaluation) {
    evaluation.cases.assign(context.facts.facts.size(), json::object());
    for (const auto& metric : metrics) {
      context.options.cancel.check("evaluation");
      put_outcome(metric->info().name, metric->finish(context, sheet), evaluation);
    }
  }

  std::vector<std::unique_ptr<Metric>> metrics;
  ScoreSheet sheet;

 private:
  static void put_outcome(const std::string& name, MetricOutcome outcome, Evaluation& evaluation) {
    evaluation.summary[name] = std::move(outcome.summary);
    for (size_t i = 0; i < outcome.cases.size(); ++i) evaluation.cases.at(i)[name] = std::move(outcome.cases[i]);
    for (size_t i = 0; i < outcome.groups.size(); ++i) {
      if (evaluation.groups.size() <= i) evaluation.groups.push_back(json::object());
      evaluation.groups[i][name] = std::move(outcome.groups[i]);
    }
    evaluation.kept.merge(outcome.kept);
  }
};

// By the engine that the options name; adds to `counts`.
std::vector<Score> score(const models::Model& model, const ScoreSheet& sheet, const EvaluateOptions& options,
                         ScoreCounts& counts) {
  if (sheet.size() == 0) return {};
  ScoreOptions how;
  how.batch_tokens = options.batch_tokens;
  how.progress = options.progress;
  how.cancel = options.cancel;
  how.sharing = options.sharing;
  ScoreCounts these;
  auto scores = options.reference ? score_reference(model, sheet, how, these)
                                  : score_requests(model, sheet.requests(), how, &these);
  counts += these;
  return scores;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Evaluation evaluate(const models::Model& model, const datasets::FactSet& facts, const std::vector<std::string>& names,
                    const EvaluateOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const MetricContext context{facts, options, &model};
  Plan plan(context, resolve_metrics(names, facts));
  Evaluation evaluation;
  plan.sheet.fill(score(model, plan.sheet, options, evaluation.counts));
  plan.observe(model, context, 0, facts.facts.size());
  plan.finish(context, evaluation);
  evaluation.seconds = seconds_since(start);
  return evaluation;
}

struct SeparateEvaluation::State {
  State(const datasets::FactSet& facts, const std::vector<std::string>& names, const EvaluateOptions& evaluate_options)
      : options(evaluate_options), context{facts, options, nullptr}, plan(context, names), scores(plan.sheet.size()) {}

  EvaluateOptions options;
  MetricContext context;
  Plan plan;
  std::vector<Score> scores;
  Evaluation evaluation;
};

SeparateEvaluation::SeparateEvaluation(const datasets::FactSet& facts, const std::vector<std::string>& names,
                                       const EvaluateOptions& options) {
  const auto resolved = resolve_metrics(names, facts);
  check(resolved);
  state_ = std::make_unique<State>(facts, resolved, options);
}

void SeparateEvaluation::check(const std::vector<std::string>& families) {
  for (const auto& name : families)
    if (!metric_info(name).alone)
      throw Error(ErrorClass::kInvalidArgument,
                  {setting("eval"), name + ", for facts that are edited one at a time, each from the unedited model",
                   "a family that judges one fact at a time, such as counterfact",
                   "leave it out, or use " + setting("protocol", "sequential")});
}

SeparateEvaluation::~SeparateEvaluation() = default;

void SeparateEvaluation::judge(const models::Model& model, size_t begin, size_t end) {
  const auto start = std::chrono::steady_clock::now();
  const auto& sheet = state_->plan.sheet;
  std::vector<size_t> numbers;
  ScoreSheet part;
  for (size_t i = 0; i < sheet.size(); ++i) {
    const size_t fact = sheet.cases()[i];
    if (fact < begin || fact >= end) continue;
    numbers.push_back(i);
    part.add(fact, sheet.requests()[i].prompt, sheet.requests()[i].target);
  }
  auto scores = score(model, part, state_->options, state_->evaluation.counts);
  for (size_t i = 0; i < numbers.size(); ++i) state_->scores[numbers[i]] = std::move(scores[i]);
  state_->plan.observe(model, state_->context, begin, end);
  state_->evaluation.seconds += seconds_since(start);
}

Evaluation SeparateEvaluation::finish() {
  state_->plan.sheet.fill(std::move(state_->scores));
  state_->plan.finish(state_->context, state_->evaluation);
  return std::move(state_->evaluation);
}

std::vector<Efficacy> evaluate_efficacy(const models::Model& model, const std::vector<datasets::Fact>& facts,
                                        const ScoreOptions& options) {
  std::vector<ScoreRequest> requests;
  for (const auto& fact : facts) {
    requests.push_back({fact.full_prompt(), fact.target_new});
    if (fact.target_true) requests.push_back({fact.full_prompt(), *fact.target_true});
  }
  const auto scores = score_requests(model, requests, options);
  std::vector<Efficacy> all;
  size_t at = 0;
  for (const auto& fact : facts) {
    Efficacy& efficacy = all.emplace_back();
    const Score& fresh = scores[at++];
    efficacy.nll_new = fresh.mean_nll();
    efficacy.accurate = fresh.all_correct();
    efficacy.probability = std::exp(fresh.total_log_prob());
    if (fact.target_true) efficacy.nll_true = scores[at++].mean_nll();
  }
  return all;
}

void RetentionMatrix::add(int64_t edits_applied, const std::vector<Efficacy>& values) {
  if (!steps_.empty() && steps_[0].values.size() != values.size())
    throw Error(ErrorClass::kInvalidArgument,
                {"retention", std::to_string(values.size()) + " facts",
                 std::to_string(steps_[0].values.size()) + " as in the first step", "give all facts in every step"});
  steps_.push_back({edits_applied, values});
}

json RetentionMatrix::to_json() const {
  json out = {{"edits_applied", json::array()}, {"success", json::array()},        {"accuracy", json::array()},
              {"probability", json::array()},   {"edited_success", json::array()}, {"nll_new", json::array()},
              {"nll_true", json::array()}};
  for (const auto& step : steps_) {
    json success = json::array(), accuracy = json::array(), probability = json::array(), fresh = json::array(),
         old = json::array();
    int64_t kept = 0;
    const int64_t edited = std::min<int64_t>(step.edits_applied, static_cast<int64_t>(step.values.size()));
    for (size_t i = 0; i < step.values.size(); ++i) {
      const auto& value = step.values[i];
      success.push_back(value.success() ? 1 : 0);
      accuracy.push_back(value.accurate ? 1 : 0);
      probability.push_back(std::round(value.probability * 1e4) / 1e4);
      fresh.push_back(value.nll_new);
      old.push_back(value.nll_true ? json(*value.nll_true) : json());
      if (static_cast<int64_t>(i) < edited && value.success()) ++kept;
    }
    out["edits_applied"].push_back(step.edits_applied);
    out["success"].push_back(success);
    out["accuracy"].push_back(accuracy);
    out["probability"].push_back(probability);
    out["nll_new"].push_back(fresh);
    out["nll_true"].push_back(old);
    out["edited_success"].push_back(edited > 0 ? json(100.0 * static_cast<double>(kept) / static_cast<double>(edited))
                                               : json());
  }
  return out;
}

RetentionMatrix RetentionMatrix::from_json(const json& json) {
  RetentionMatrix matrix;
  try {
    const auto& steps = json.at("edits_applied");
    for (size_t s = 0; s < steps.size(); ++s) {
      std::vector<Efficacy> values;
      const auto& fresh = json.at("nll_new").at(s);
      for (size_t i = 0; i < fresh.size(); ++i) {
        Efficacy efficacy;
        efficacy.nll_new = fresh.at(i).get<double>();
        efficacy.probability = json.at("probability").at(s).at(i).get<double>();
        efficacy.accurate = json.at("accuracy").at(s).at(i).get<int>() != 0;
        const auto& old = json.at("nll_true").at(s).at(i);
        if (!old.is_null()) efficacy.nll_true = old.get<double>();
        values.push_back(efficacy);
      }
      matrix.add(steps.at(s).get<int64_t>(), values);
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorClass::kCorruption,
                {"retention matrix", error.what(), "what RetentionMatrix::to_json writes", "run the evaluation again"});
  }
  return matrix;
}

json to_json(const Evaluation& evaluation) {
  const auto& counts = evaluation.counts;
  return {{"summary", evaluation.summary},
          {"cases", evaluation.cases},
          {"groups", evaluation.groups},
          {"seconds", evaluation.seconds},
          {"counts",
           {{"requests", counts.requests},
            {"unique_prompts", counts.unique_prompts},
            {"tokens_given", counts.tokens_given},
            {"tokens_run", counts.tokens_run},
            {"rows_projected", counts.rows_projected}}}};
}

Evaluation evaluation_from_json(const json& json) {
  Evaluation evaluation;
  try {
    evaluation.summary = json.at("summary");
    evaluation.cases = json.at("cases").get<std::vector<nlohmann::json>>();
    evaluation.groups = json.at("groups").get<std::vector<nlohmann::json>>();
    evaluation.seconds = json.at("seconds").get<double>();
    const auto& counts = json.at("counts");
    evaluation.counts = {counts.at("requests").get<int64_t>(), counts.at("unique_prompts").get<int64_t>(),
                         counts.at("tokens_given").get<int64_t>(), counts.at("tokens_run").get<int64_t>(),
                         counts.at("rows_projected").get<int64_t>()};
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorClass::kCorruption, {"stored evaluation", error.what(), "what evaluation::to_json writes",
                                          "remove the file; it is made again"});
  }
  return evaluation;
}

}  // namespace emend::evaluation
