#include <emend/core/error.h>
#include <emend/evaluation/metric.h>
#include <emend/evaluation/statistics.h>

namespace emend::evaluation {

#define EMEND_METRIC(name) std::unique_ptr<Metric> make_##name();
#include <emend/evaluation/metrics.def>
#undef EMEND_METRIC

namespace {

struct Registered {
  const char* name;
  std::unique_ptr<Metric> (*make)();
};

constexpr Registered kFamilies[] = {
#define EMEND_METRIC(name) {#name, make_##name},
#include <emend/evaluation/metrics.def>
#undef EMEND_METRIC
};

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& family : kFamilies) all.emplace_back(family.name);
  return all;
}

[[noreturn]] void unknown(const std::string& name) {
  std::string listed;
  for (const auto& known : names()) listed += (listed.empty() ? "" : ", ") + known;
  const std::string closest = closest_name(name, names());
  throw Error(ErrorClass::kInvalidArgument,
              {"metrics", "unknown metric \"" + name + "\"", "one of " + listed + ", or auto, none",
               closest.empty() ? "" : "did you mean \"" + closest + "\"?"});
}

}  // namespace

size_t ScoreSheet::add(size_t fact, std::string prompt, std::string target) {
  requests_.push_back({std::move(prompt), std::move(target)});
  cases_.push_back(fact);
  return requests_.size() - 1;
}

void ScoreSheet::fill(std::vector<Score> scores) {
  EMEND_CHECK(scores.size() == requests_.size(), "one score a request");
  scores_ = std::move(scores);
}

std::unique_ptr<Metric> make_metric(const std::string& name) {
  for (const auto& family : kFamilies)
    if (name == family.name) return family.make();
  unknown(name);
}

const std::vector<MetricInfo>& metric_families() {
  static const std::vector<MetricInfo> all = [] {
    std::vector<MetricInfo> infos;
    for (const auto& family : kFamilies) infos.push_back(family.make()->info());
    return infos;
  }();
  return all;
}

const MetricInfo& metric_info(const std::string& name) {
  for (const auto& info : metric_families())
    if (info.name == name) return info;
  unknown(name);
}

std::vector<std::string> resolve_metrics(const std::vector<std::string>& wanted, const datasets::FactSet& facts) {
  std::vector<std::string> resolved;
  const auto add = [&](const std::string& name) {
    if (std::find(resolved.begin(), resolved.end(), name) == resolved.end()) resolved.push_back(name);
  };
  for (const auto& name : wanted) {
    if (name == "none" || name.empty()) continue;
    if (name != "auto") {
      add(metric_info(name).name);
      continue;
    }
    for (const auto& family : kFamilies)
      if (family.make()->suits(facts)) add(family.name);
  }
  return resolved;
}

void put_mean(nlohmann::json& summary, const std::string& key, const std::vector<std::optional<double>>& records,
              double scale) {
  const auto mean = mean_of(records);
  summary[key] = mean ? nlohmann::json(scale * mean->value) : nlohmann::json();
  if (!mean) return;
  summary["ci95"][key] = scale * mean->ci95;
  summary["std"][key] = scale * mean->deviation;
  summary["counts"][key] = mean->n;
}

std::optional<double> record_mean(const std::vector<double>& values) {
  const auto mean = mean_of(values);
  return mean ? std::optional(mean->value) : std::nullopt;
}

}  // namespace emend::evaluation
