#include <emend/editors/editor.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace emend::editors {
namespace {

// JSON has no NaN; a number that is not one is null.
nlohmann::json number(double value) {
  return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json();
}

double value_of(const nlohmann::json& json) {
  return json.is_null() ? std::numeric_limits<double>::quiet_NaN() : json.get<double>();
}

FactStatus parse_status(const std::string& text) {
  for (const auto status : {FactStatus::kConverged, FactStatus::kClamped, FactStatus::kMaxSteps})
    if (text == to_string(status)) return status;
  return FactStatus::kFailed;
}

template <class Get>
nlohmann::json numbers(const std::vector<LossTerms>& curve, Get get) {
  auto list = nlohmann::json::array();
  for (const auto& terms : curve) list.push_back(number(get(terms)));
  return list;
}

}  // namespace

std::string_view to_string(FactStatus status) noexcept {
  constexpr std::string_view kNames[] = {"converged", "clamped", "max_steps", "failed"};
  return kNames[static_cast<size_t>(status)];
}

int64_t EditResult::failed() const {
  return std::count_if(outcomes.begin(), outcomes.end(), [](const auto& o) { return o.status == FactStatus::kFailed; });
}

nlohmann::json to_json(const FactOutcome& outcome, bool with_curve) {
  nlohmann::json json = {{"case_id", outcome.case_id},
                         {"status", to_string(outcome.status)},
                         {"steps", outcome.steps},
                         {"loss", number(outcome.last.loss)},
                         {"nll", number(outcome.last.nll)},
                         {"kl", number(outcome.last.kl)},
                         {"weight_decay", number(outcome.last.weight_decay)},
                         {"target_probability", number(outcome.last.probability)},
                         {"delta_norm", number(outcome.delta_norm)},
                         {"initial_norm", number(outcome.initial_norm)},
                         {"tokens", outcome.tokens},
                         {"token_ids", outcome.token_ids},
                         {"subject_span", {outcome.subject_span.first, outcome.subject_span.second}},
                         {"target_span", {outcome.target_span.first, outcome.target_span.second}},
                         {"lookup", outcome.lookup}};
  if (!outcome.reason.empty()) json["reason"] = outcome.reason;
  if (with_curve) {
    json["curve"] = {{"loss", numbers(outcome.curve, [](const LossTerms& t) { return t.loss; })},
                     {"nll", numbers(outcome.curve, [](const LossTerms& t) { return t.nll; })},
                     {"kl", numbers(outcome.curve, [](const LossTerms& t) { return t.kl; })},
                     {"weight_decay", numbers(outcome.curve, [](const LossTerms& t) { return t.weight_decay; })},
                     {"probability", numbers(outcome.curve, [](const LossTerms& t) { return t.probability; })}};
  }
  return json;
}

nlohmann::json to_json(const LayerFigures& figures) {
  nlohmann::json json = {{"layer", figures.layer},
                         {"weight", figures.weight},
                         {"update_norm", number(figures.update_norm)},
                         {"relative_update_norm", number(figures.relative_update_norm)},
                         {"survived", number(figures.survived)},
                         {"residual_norm", number(figures.residual_norm)},
                         {"key_norm", number(figures.key_norm)}};
  if (!figures.solver.empty()) {
    json["solver"] = figures.solver;
    json["condition"] = number(figures.condition);
    json["jitter"] = number(figures.jitter);
  }
  return json;
}

FactOutcome outcome_from_json(const nlohmann::json& json) {
  FactOutcome outcome;
  json.at("case_id").get_to(outcome.case_id);
  outcome.status = parse_status(json.at("status").get<std::string>());
  outcome.reason = json.value("reason", "");
  json.at("steps").get_to(outcome.steps);
  outcome.last = {value_of(json.at("loss")), value_of(json.at("nll")), value_of(json.at("kl")),
                  value_of(json.at("weight_decay")), value_of(json.at("target_probability"))};
  outcome.delta_norm = value_of(json.at("delta_norm"));
  outcome.initial_norm = value_of(json.at("initial_norm"));
  json.at("tokens").get_to(outcome.tokens);
  json.at("token_ids").get_to(outcome.token_ids);
  json.at("subject_span").get_to(outcome.subject_span);
  json.at("target_span").get_to(outcome.target_span);
  json.at("lookup").get_to(outcome.lookup);
  const auto curve = json.value("curve", nlohmann::json::object());
  for (size_t i = 0; curve.contains("loss") && i < curve["loss"].size(); ++i)
    outcome.curve.push_back({value_of(curve["loss"][i]), value_of(curve.at("nll").at(i)),
                             value_of(curve.at("kl").at(i)), value_of(curve.at("weight_decay").at(i)),
                             value_of(curve.at("probability").at(i))});
  return outcome;
}

LayerFigures figures_from_json(const nlohmann::json& json) {
  LayerFigures figures;
  json.at("layer").get_to(figures.layer);
  json.at("weight").get_to(figures.weight);
  figures.update_norm = value_of(json.at("update_norm"));
  figures.relative_update_norm = value_of(json.at("relative_update_norm"));
  figures.survived = value_of(json.at("survived"));
  figures.residual_norm = value_of(json.at("residual_norm"));
  figures.key_norm = value_of(json.at("key_norm"));
  figures.solver = json.value("solver", "");
  if (figures.solver.empty()) return figures;
  figures.condition = value_of(json.at("condition"));
  figures.jitter = value_of(json.at("jitter"));
  return figures;
}

nlohmann::json EditResult::to_json() const {
  nlohmann::json json = {{"editor", editor},
                         {"hparams", hparams},
                         {"engine", to_string(engine)},
                         {"seed", seed},
                         {"seconds", seconds},
                         {"facts", outcomes.size()},
                         {"failed", failed()},
                         {"outcomes", nlohmann::json::array()},
                         {"layers", nlohmann::json::array()},
                         {"deltas", nlohmann::json::array()}};
  for (const auto& outcome : outcomes) json["outcomes"].push_back(editors::to_json(outcome));
  for (const auto& figures : layers) json["layers"].push_back(editors::to_json(figures));
  for (const auto& delta : deltas) {
    json["deltas"].push_back({{"weight", delta.weight},
                              {"layer", delta.layer},
                              {"shape", delta.shape()},
                              {"form", delta.low_rank() ? "factors" : "dense"},
                              {"rank", delta.rank()}});
  }
  if (contexts) json["contexts"] = contexts->to_json();
  return json;
}

}  // namespace emend::editors
