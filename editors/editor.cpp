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

// What a curve has of each iteration. The last one is "target_probability" in an outcome itself.
constexpr std::pair<const char*, double LossTerms::*> kTerms[] = {{"loss", &LossTerms::loss},
                                                                  {"nll", &LossTerms::nll},
                                                                  {"kl", &LossTerms::kl},
                                                                  {"weight_decay", &LossTerms::weight_decay},
                                                                  {"probability", &LossTerms::probability}};

std::string last_name(const std::string& term) {
  return term == "probability" ? "target_probability" : term;
}

// What every figure has, and what a solved system adds.
using Figure = std::pair<const char*, double LayerFigures::*>;
constexpr Figure kFigures[] = {{"update_norm", &LayerFigures::update_norm},
                               {"relative_update_norm", &LayerFigures::relative_update_norm},
                               {"survived", &LayerFigures::survived},
                               {"residual_norm", &LayerFigures::residual_norm},
                               {"key_norm", &LayerFigures::key_norm}};
constexpr Figure kSolveFigures[] = {{"condition", &LayerFigures::condition}, {"jitter", &LayerFigures::jitter}};

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
                         {"delta_norm", number(outcome.delta_norm)},
                         {"initial_norm", number(outcome.initial_norm)},
                         {"tokens", outcome.tokens},
                         {"token_ids", outcome.token_ids},
                         {"subject_span", {outcome.subject_span.first, outcome.subject_span.second}},
                         {"target_span", {outcome.target_span.first, outcome.target_span.second}},
                         {"lookup", outcome.lookup}};
  if (!outcome.reason.empty()) json["reason"] = outcome.reason;
  for (const auto& [name, term] : kTerms) {
    json[last_name(name)] = number(outcome.last.*term);
    if (!with_curve) continue;
    auto& list = json["curve"][name] = nlohmann::json::array();
    for (const auto& terms : outcome.curve) list.push_back(number(terms.*term));
  }
  return json;
}

nlohmann::json to_json(const LayerFigures& figures) {
  nlohmann::json json = {{"layer", figures.layer}, {"weight", figures.weight}};
  for (const auto& [name, figure] : kFigures) json[name] = number(figures.*figure);
  if (figures.solver.empty()) return json;
  json["solver"] = figures.solver;
  for (const auto& [name, figure] : kSolveFigures) json[name] = number(figures.*figure);
  return json;
}

FactOutcome outcome_from_json(const nlohmann::json& json) {
  FactOutcome outcome;
  json.at("case_id").get_to(outcome.case_id);
  outcome.status = parse_status(json.at("status").get<std::string>());
  outcome.reason = json.value("reason", "");
  json.at("steps").get_to(outcome.steps);
  outcome.delta_norm = value_of(json.at("delta_norm"));
  outcome.initial_norm = value_of(json.at("initial_norm"));
  json.at("tokens").get_to(outcome.tokens);
  json.at("token_ids").get_to(outcome.token_ids);
  json.at("subject_span").get_to(outcome.subject_span);
  json.at("target_span").get_to(outcome.target_span);
  json.at("lookup").get_to(outcome.lookup);
  const auto curve = json.value("curve", nlohmann::json::object());
  if (curve.contains("loss")) outcome.curve.resize(curve["loss"].size());
  for (const auto& [name, term] : kTerms) {
    outcome.last.*term = value_of(json.at(last_name(name)));
    for (size_t i = 0; i < outcome.curve.size(); ++i) outcome.curve[i].*term = value_of(curve.at(name).at(i));
  }
  return outcome;
}

LayerFigures figures_from_json(const nlohmann::json& json) {
  LayerFigures figures;
  json.at("layer").get_to(figures.layer);
  json.at("weight").get_to(figures.weight);
  for (const auto& [name, figure] : kFigures) figures.*figure = value_of(json.at(name));
  figures.solver = json.value("solver", "");
  if (figures.solver.empty()) return figures;
  for (const auto& [name, figure] : kSolveFigures) figures.*figure = value_of(json.at(name));
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
