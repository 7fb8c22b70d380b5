#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/metric.h>
#include <emend/evaluation/statistics.h>

#include <algorithm>
#include <limits>

namespace emend::evaluation {

#define EMEND_METRIC(name) MetricInfo make_##name();
#include <emend/evaluation/metrics.def>
#undef EMEND_METRIC

namespace {

using nlohmann::json;
using Column = std::vector<std::optional<double>>;

/// A figure or null under `key`; its interval goes to summary["ci95"][key], the standard deviation to
/// summary["std"][key], the number of records to summary["counts"][key].
void put_mean(json& summary, const std::string& key, const Column& records, const MetricField& field) {
  const auto mean = mean_of(records);
  summary[key] = mean ? json(field.scale * mean->value) : json();
  if (!mean) return;
  const auto range = field.share() ? share_interval(mean->value, mean->n) : mean_interval(*mean);
  const auto [least, most] = field.limits();
  summary["ci95"][key] =
      range ? json{field.scale * std::max(range->first, least), field.scale * std::min(range->second, most)} : json();
  summary["std"][key] = field.scale * mean->deviation;
  summary["counts"][key] = mean->n;
}

void put_harmonic(json& summary, const MetricField& field, const std::map<std::string, Column>& columns,
                  const EvaluateOptions& options) {
  summary[field.key] = nullptr;
  std::vector<double> means;
  std::vector<Column> values;
  for (const auto& part : field.harmonic_of) {
    if (summary[part].is_null()) return;
    means.push_back(summary[part].get<double>());
    values.push_back(columns.at(part));
  }
  summary[field.key] = *harmonic_mean(means);
  if (const auto range = bootstrap_harmonic(values, options.bootstrap, options.seed))
    summary[field.key + "_ci95"] = {100 * range->first, 100 * range->second};
}

/// Means by the facts' own keys.
json keyed_means(const std::vector<json>& cases, const std::string& name) {
  std::map<std::string, Column> columns;
  for (const auto& row : cases)
    for (const auto& [key, value] : row.at(name).items()) columns[key].push_back(value.get<double>());
  json means = json::object();
  MetricField share;
  share.unit = "%";
  for (const auto& [key, column] : columns) put_mean(means, key, column, share);
  return means;
}

}  // namespace

Interval MetricField::limits() const {
  if (difference) return {-1, 1};
  return {0, share() || unit == "× 100" ? 1 : std::numeric_limits<double>::infinity()};
}

int MetricField::digits() const {
  return unit == "nat" ? 4 : difference || unit == "bit" || unit == "perplexity" ? 2 : 1;
}

const MetricField* MetricInfo::field(std::string_view key) const {
  const auto found = std::ranges::find(fields, key, &MetricField::key);
  return found == fields.end() ? nullptr : &*found;
}

void ScoreSheet::add(size_t fact, const std::string& prompt, std::string target, Read read, std::string_view question) {
  const std::string before = front ? front(question.empty() ? prompt : question) : "";
  requests_.push_back({before + prompt, std::move(target)});
  cases_.push_back(fact);
  reads_.push_back(std::move(read));
}

void ScoreSheet::fill(const std::vector<Score>& scores) const {
  EMEND_CHECK(scores.size() == requests_.size(), "one score a request");
  for (size_t i = 0; i < scores.size(); ++i) reads_[i](scores[i]);
}

std::unique_ptr<Metric> make_metric(const std::string& name) {
  const MetricInfo& info = metric_info(name);
  return info.make(info);
}

const std::vector<MetricInfo>& metric_families() {
  static const std::vector<MetricInfo> all = {
#define EMEND_METRIC(name) make_##name(),
#include <emend/evaluation/metrics.def>
#undef EMEND_METRIC
  };
  return all;
}

const MetricInfo& metric_info(const std::string& name) {
  const auto& all = metric_families();
  if (const auto found = std::ranges::find(all, name, &MetricInfo::name); found != all.end()) return *found;
  refuse({"metrics", "unknown metric \"" + name + "\"",
          "one of " + join(all, ", ", &MetricInfo::name) + ", or auto, none",
          did_you_mean(name, all, "", &MetricInfo::name)});
}

std::vector<std::string> resolve_metrics(const std::vector<std::string>& wanted, const datasets::FactSet& facts) {
  std::vector<std::string> resolved;
  const auto add = [&](const std::string& name) {
    if (std::ranges::find(resolved, name) == resolved.end()) resolved.push_back(name);
  };
  for (const auto& name : wanted) {
    if (name == "none" && wanted.size() > 1)
      refuse({setting("eval"), "none beside others", "none, or what to measure", ""});
    if (name == "none" || name.empty()) continue;
    if (name != "auto") {
      add(metric_info(name).name);
      continue;
    }
    for (const auto& family : metric_families())
      if (family.make(family)->suits(facts)) add(family.name);
  }
  return resolved;
}

MetricOutcome Metric::finish(const MetricContext& context) {
  measure(context);
  summarise(context, outcome_);
  return std::move(outcome_);
}

void Metric::summarise(const MetricContext& context, MetricOutcome& outcome) const {
  json& summary = outcome.summary;
  summary.emplace("n", outcome.cases.size());
  std::map<std::string, Column> columns;
  for (const auto& field : info().fields) {
    if (!field.of_case) continue;
    Column& column = columns[field.key];
    for (const auto& row : field.of_groups ? outcome.groups : outcome.cases) column.push_back(field.of_case(row));
    put_mean(summary, field.key, column, field);
    if (field.optional && summary[field.key].is_null()) summary.erase(field.key);
  }
  for (const auto& field : info().fields)
    if (!field.harmonic_of.empty()) put_harmonic(summary, field, columns, context.options);
  for (const auto& name : info().keyed) summary[name] = keyed_means(outcome.cases, name);
}

std::optional<double> record_mean(const std::vector<double>& values) {
  const auto mean = mean_of(values);
  return mean ? std::optional(mean->value) : std::nullopt;
}

MetricField difference(MetricField field) {
  field.difference = true;
  return field;
}

MetricField of_groups(MetricField field) {
  field.of_groups = true;
  return field;
}

MetricField optional(MetricField field) {
  field.optional = true;
  return field;
}

MetricField harmonic_score(std::string definition, std::vector<std::string> columns) {
  return {"score", "S", std::move(definition), "%", true, {}, "score", 100, std::move(columns)};
}

CaseFigure value_of(std::string key) {
  return [key = std::move(key)](const json& raw) -> std::optional<double> {
    const json& value = detail::member(raw, {key});
    return value.is_boolean() ? std::optional(value.get<bool>() ? 1.0 : 0.0) : detail::as_number(value);
  };
}

CaseFigure share_of_true(std::string key) {
  return [key = std::move(key)](const json& raw) {
    std::vector<double> values;
    if (const json& list = detail::member(raw, {key}); list.is_array())
      for (const auto& value : list) values.push_back(value == json(true) ? 1 : 0);
    return record_mean(values);
  };
}

CaseFigure mean_of_keys(std::string key) {
  return [key = std::move(key)](const json& raw) {
    std::vector<double> values;
    if (const json& object = detail::member(raw, {key}); object.is_object())
      for (const auto& value : object)
        if (value.is_number()) values.push_back(value.get<double>());
    return record_mean(values);
  };
}

CaseVerdict said_in_full(const std::optional<double>& share) {
  if (!share) return {};
  CaseVerdict verdict;
  verdict.success = *share >= 1;
  if (!*verdict.success)
    verdict.reason = "the model does not say the target in full (" + whole_percent(*share) + " of its tokens)";
  return verdict;
}

}  // namespace emend::evaluation
