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
  nlohmann::json json = {
      {"relative_update", reading.relative_update}, {"condition", reading.condition}, {"alarms", reading.alarms}};
  json["divergence"] = std::isfinite(reading.divergence) ? nlohmann::json(reading.divergence) : nlohmann::json();
  return json;
}

GuardReading guard_reading_from_json(const nlohmann::json& json) {
  GuardReading reading;
  json.at("relative_update").get_to(reading.relative_update);
  json.at("condition").get_to(reading.condition);
  json.at("alarms").get_to(reading.alarms);
  const auto& divergence = json.at("divergence");
  reading.divergence = divergence.is_null() ? std::numeric_limits<double>::infinity() : divergence.get<double>();
  return reading;
}

CollapseGuard::CollapseGuard(const models::Model& unedited, GuardLimits limits, ScoreOptions options)
    : limits_(limits),
      options_(std::move(options)),
      before_PV_(next_token_log_probs(unedited, probe_prompts(), options_)) {}

GuardReading CollapseGuard::read(const models::Model& model, double relative_update, double condition) const {
  GuardReading reading;
  reading.relative_update = relative_update;
  reading.condition = condition;
  try {
    reading.divergence = mean_divergence(before_PV_, next_token_log_probs(model, probe_prompts(), options_));
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
