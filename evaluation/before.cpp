// The evaluation of the unedited model, remembered; and the facts' own continuations.
#include <ATen/ATen.h>
#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/core/sha256.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/metric.h>
#include <emend/models/tokenizer/tokenizer.h>

namespace emend::evaluation {
namespace {

using nlohmann::json;

constexpr int kFormat = 3;

json cache_key(const models::Model& model, const datasets::FactSet& facts, const std::vector<std::string>& names,
               const EvaluateOptions& options) {
  json metrics = json::array();
  for (const auto& name : names) {
    const auto metric = make_metric(name);
    metrics.push_back({name, metric->info().version, metric->key(options)});
  }
  const std::string& facts_key = facts.fingerprint.empty() ? datasets::fingerprint(facts.facts) : facts.fingerprint;
  return {{"format", kFormat},
          {"model", model.fingerprint()},
          {"dtype", c10::toString(model.dtype())},
          {"tokenizer", model.tokenizer().fingerprint()},
          {"facts", facts_key},
          {"metrics", metrics},
          {"bootstrap", options.bootstrap},
          {"seed", options.seed},
          {"reference", options.reference}};
}

/// The stored evaluation, or nothing with a warning if the file is damaged.
std::optional<Evaluation> read_stored(const std::filesystem::path& path, const std::string& key, const Log& log) {
  try {
    const auto file = open_cached(path);
    if (!file) return std::nullopt;
    const auto& metadata = file->metadata();
    const auto text = metadata.find("evaluation"), stored_key = metadata.find("key");
    if (text == metadata.end() || stored_key == metadata.end() || stored_key->second != key)
      throw Error(ErrorClass::kCorruption,
                  {path.string(), "contents that do not match their key", "an intact file", ""});
    Evaluation evaluation = evaluation_from_json(json::parse(text->second));
    for (const auto& [name, info] : file->tensors()) evaluation.kept[name] = file->tensor(name).clone();
    return evaluation;
  } catch (const std::exception& error) {
    log.warning("evaluation.cache", std::string("the stored evaluation is damaged and is made again: ") + error.what());
    return std::nullopt;
  }
}

}  // namespace

Evaluation evaluate_before(const models::Model& model, const datasets::FactSet& facts,
                           const std::vector<std::string>& names, const EvaluateOptions& options,
                           const std::filesystem::path& cache_folder, bool* from_cache) {
  if (from_cache) *from_cache = false;
  const auto resolved = resolve_metrics(names, facts);
  EvaluateOptions own = options;
  own.before = nullptr;
  if (cache_folder.empty()) return evaluate(model, facts, resolved, own);
  const std::string key = cache_key(model, facts, resolved, own).dump();
  const auto path = cache_folder / ("before-" + sha256_hex(key).substr(0, 32) + ".safetensors");
  auto stored = read_stored(path, key, options.log);
  if (options.sharing.all(stored.has_value())) {  // evaluated by all together if one lacks it
    if (from_cache) *from_cache = true;
    return std::move(*stored);
  }
  Evaluation evaluation = evaluate(model, facts, resolved, own);
  if (!options.sharing.first()) return evaluation;
  const std::string text = to_json(evaluation).dump(-1, ' ', false, json::error_handler_t::replace);
  const std::vector<std::pair<std::string, at::Tensor>> tensors(evaluation.kept.begin(), evaluation.kept.end());
  std::error_code ignored;
  std::filesystem::create_directories(cache_folder, ignored);
  try {
    write_checked(path, tensors, {{"evaluation", text}, {"key", key}});
    prune_cache(cache_folder, cache_limit(), path);
  } catch (const Error& error) {
    options.log.warning("evaluation.cache", std::string("the evaluation could not be stored: ") + error.what());
  }
  return evaluation;
}

std::vector<Continuation> continue_facts(const models::Model& model, const std::vector<datasets::Fact>& facts,
                                         int64_t new_tokens, const CancelToken& cancel) {
  if (facts.empty()) return {};
  std::vector<std::string> prompts;
  for (const auto& fact : facts) prompts.push_back(fact.full_prompt());
  ScoreOptions score_options;
  score_options.cancel = cancel;
  const auto efficacies = evaluate_efficacy(model, facts, score_options);
  std::vector<Continuation> all;
  FreeTextOptions free;
  free.max_tokens = new_tokens;
  free.whole_sentence = false;
  free.cancel = cancel;
  auto texts = write_on(model, prompts, free);
  for (size_t i = 0; i < facts.size(); ++i)
    all.push_back({prompts[i], std::move(texts[i].text), efficacies[i].probability});
  return all;
}

}  // namespace emend::evaluation
