#include <emend/evaluation/detail/case_values.h>
#include <emend/evaluation/detail/html.h>

#include <cmath>

namespace emend::evaluation::detail {
namespace {

using nlohmann::json;

void put_share(std::map<std::string, double>& values, const std::string& key, const json& list) {
  if (!list.is_array() || list.empty()) return;
  double sum = 0;
  for (const auto& value : list) sum += value.is_boolean() && value.get<bool>() ? 1 : 0;
  values[key] = sum / static_cast<double>(list.size());
}

void put_success(std::map<std::string, double>& values, const std::string& key, const json& list, bool true_is_right) {
  if (!list.is_array()) return;
  double sum = 0, n = 0;
  for (const auto& pair : list) {
    const auto fresh = number(pair, "target_new"), old = number(pair, "target_true");
    if (!fresh || !old) continue;
    n += 1;
    sum += (true_is_right ? *old < *fresh : *old > *fresh) ? 1 : 0;
  }
  if (n > 0) values[key] = sum / n;
}

void put_mean_of_keys(std::map<std::string, double>& values, const std::string& key, const json& object) {
  if (!object.is_object()) return;
  double sum = 0, n = 0;
  for (const auto& value : object)
    if (value.is_number()) sum += value.get<double>(), n += 1;
  if (n > 0) values[key] = sum / n;
}

}  // namespace

std::map<std::string, double> case_values(const std::string& family, const json& raw) {
  std::map<std::string, double> values;
  const std::pair<const char*, const char*> kinds[] = {
      {"efficacy", "rewrite_prompts"}, {"paraphrase", "paraphrase_prompts"}, {"neighborhood", "neighborhood_prompts"}};
  if (family == "counterfact" || family == "zsre") {
    for (const auto& [name, prompts] : kinds) {
      put_success(values, std::string(name) + "_success", member(raw, {std::string(prompts) + "_probs"}),
                  name == kinds[2].first);
      put_share(values, std::string(name) + "_accuracy", member(raw, {std::string(prompts) + "_correct"}));
    }
  } else if (family == "easyedit") {
    for (const char* key : {"rewrite_acc", "rephrase_acc"})
      if (const auto value = number(raw, key)) values[key] = *value;
    put_mean_of_keys(values, "locality_acc", member(raw, {"locality"}));
    put_mean_of_keys(values, "portability_acc", member(raw, {"portability"}));
  } else if (family == "mquake") {
    const json& value = member(raw, {"edit_wise"});
    if (value.is_boolean()) values["edit_wise"] = value.get<bool>() ? 1 : 0;
  } else if (family == "generation") {
    for (const char* key : {"ngram_entropy", "reference_score", "essence_score"})
      if (const auto value = number(raw, key)) values[key] = *value;
  }
  return values;
}

const json& case_metrics(const json& line, const std::string& when, const std::string& family) {
  const json& nested = member(line, {"metrics", when, family});
  return nested.is_null() ? member(line, {when, family}) : nested;
}

TargetProbabilities target_probabilities(const json& line, const std::string& when) {
  TargetProbabilities out;
  const json& pairs = member(case_metrics(line, when, "counterfact"), {"rewrite_prompts_probs"});
  if (!pairs.is_array() || pairs.empty()) return out;
  if (const auto nll = number(pairs[0], "target_new")) out.fresh = std::exp(-*nll);
  if (const auto nll = number(pairs[0], "target_true")) out.old = std::exp(-*nll);
  return out;
}

}  // namespace emend::evaluation::detail
