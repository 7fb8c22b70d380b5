#include <emend/core/error.h>
#include <emend/editors/editor.h>

#include <algorithm>
#include <cmath>

namespace emend::editors {
namespace {

// JSON has no NaN; a number that is not one is null.
nlohmann::json number(double value) {
  return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json();
}

template <class Get>
nlohmann::json numbers(const std::vector<LossTerms>& curve, Get get) {
  auto list = nlohmann::json::array();
  for (const auto& terms : curve) list.push_back(number(get(terms)));
  return list;
}

}  // namespace

std::string_view to_string(Engine engine) noexcept {
  return engine == Engine::kFast ? "fast" : "reference";
}

Engine parse_engine(std::string_view text) {
  if (text == "fast") return Engine::kFast;
  if (text == "reference") return Engine::kReference;
  throw Error(ErrorClass::kInvalidArgument, {"engine", "\"" + std::string(text) + "\"", "fast or reference", ""});
}

std::string_view to_string(FactStatus status) noexcept {
  switch (status) {
    case FactStatus::kConverged:
      return "converged";
    case FactStatus::kClamped:
      return "clamped";
    case FactStatus::kMaxSteps:
      return "max_steps";
    case FactStatus::kFailed:
      return "failed";
  }
  return "failed";
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
