#include <ATen/ATen.h>
#include <emend/core/text.h>
#include <emend/evaluation/collapse_guard.h>
#include <emend/evaluation/health.h>

#include <cmath>
#include <limits>

namespace emend::evaluation {
namespace {

void compare(const char* what, double value, double limit, std::vector<std::string>& alarms) {
  if (limit > 0 && !(value <= limit)) alarms.push_back(formatted("%s %.3g, limit %.3g", what, value, limit));
}

}  // namespace

nlohmann::json to_json(const GuardReading& reading) {
  const auto finite = [](double value) { return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(); };
  return {{"relative_update", finite(reading.relative_update)},
          {"condition", finite(reading.condition)},
          {"alarms", reading.alarms},
          {"divergence", finite(reading.divergence)}};
}

GuardReading guard_reading_from_json(const nlohmann::json& json) {
  GuardReading reading;
  const auto number = [&](const char* name) {
    return json.at(name).is_null() ? std::numeric_limits<double>::infinity() : json.at(name).get<double>();
  };
  reading.relative_update = number("relative_update");
  reading.condition = number("condition");
  reading.divergence = number("divergence");
  json.at("alarms").get_to(reading.alarms);
  return reading;
}

CollapseGuard::CollapseGuard(const models::Model& unedited, GuardLimits limits)
    : limits_(limits), before_PV_(next_token_log_probs(unedited, probe_prompts())) {}

GuardReading CollapseGuard::read(const models::Model& model, double relative_update, double condition) const {
  GuardReading reading;
  reading.relative_update = relative_update;
  reading.condition = condition;
  try {
    reading.divergence = mean_divergence(before_PV_, next_token_log_probs(model, probe_prompts()));
  } catch (const Error& error) {
    if (error.error_class() != ErrorClass::kNumeric) throw;
    reading.divergence = std::numeric_limits<double>::infinity();
  }
  if (std::isnan(reading.divergence)) reading.divergence = std::numeric_limits<double>::infinity();
  compare("divergence from the unedited model on the probe prompts (nat):", reading.divergence, limits_.divergence,
          reading.alarms);
  compare("size of the update relative to its weight:", reading.relative_update, limits_.relative_update,
          reading.alarms);
  compare("condition number of the solved system:", reading.condition, limits_.condition, reading.alarms);
  return reading;
}

}  // namespace emend::evaluation
