#include <ATen/ATen.h>
#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/setting.h>
#include <emend/core/sha256.h>
#include <emend/devices/runtime.h>
#include <emend/evaluation/detail/scoring.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/metric.h>
#include <emend/models/chat.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <cmath>
#include <utility>

namespace emend::evaluation {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Evaluation, summary, cases, groups)

namespace {

using nlohmann::json;

/// The published loop works case by case; within a case every text is scored once. `owners`: the case of each request.
std::vector<Score> score_reference(const models::Model& model, const std::vector<ScoreRequest>& requests,
                                   const std::vector<size_t>& owners, const ScoreOptions& options) {
  std::vector<std::vector<ScoreRequest>> cases;
  std::map<size_t, size_t> case_of;
  std::vector<std::pair<size_t, size_t>> place;
  std::vector<std::map<ScoreRequest, size_t>> seen;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto [at, is_new] = case_of.emplace(owners[i], cases.size());
    if (is_new) cases.emplace_back(), seen.emplace_back();
    const auto [row, is_new_row] = seen[at->second].emplace(requests[i], cases[at->second].size());
    if (is_new_row) cases[at->second].push_back(requests[i]);
    place.emplace_back(at->second, row->second);
  }
  const auto scores = score_cases_reference(model, cases, options);
  return mapped(place, [&](const auto& at) { return scores[at.first][at.second]; });
}

std::vector<std::unique_ptr<Metric>> chosen(const std::vector<std::string>& names, const datasets::FactSet& facts) {
  return mapped(resolve_metrics(names, facts), make_metric);
}

constexpr int kFormat = 5;

// Hash of what the template makes of a message, which may be another tomorrow (strftime_now); null where it makes
// nothing: that is said where the model is asked.
json rendered_message(const models::Tokenizer& tokenizer) {
  if (tokenizer.chat_template().empty()) return nullptr;
  try {
    return sha256_hex(models::render_chat(models::chat_format_of(tokenizer), {{"user", "?"}}, true).text);
  } catch (const Error&) {
    return nullptr;
  }
}

json cache_key(const models::Model& model, const datasets::FactSet& facts, const std::vector<std::string>& names,
               const EvaluateOptions& options) {
  json metrics = json::array();
  for (const auto& metric : chosen(names, facts))
    metrics.push_back({metric->info().name, metric->info().version, metric->key(options)});
  if (options.free_style != "plain")
    metrics.push_back({"chat template", model.tokenizer().chat_template(), rendered_message(model.tokenizer())});
  return {{"format", kFormat},
          {"model", model.current_fingerprint()},
          {"dtype", devices::tf32_products() ? "tf32" : c10::toString(model.dtype())},
          {"tokenizer", model.tokenizer().fingerprint()},
          {"facts", datasets::fingerprint_of(facts)},
          {"metrics", metrics},
          {"bootstrap", options.bootstrap},
          {"seed", options.seed},
          {"reference", options.reference}};
}

/// Hash of what is asked, by which two evaluations can be compared; the answers may differ.
std::string questions_of(const datasets::FactSet& facts) {
  Sha256 hash;
  for (const auto& fact : facts.facts) {
    hash.update(fact.full_prompt() + '\n');
    for (const auto& prompt : fact.neighborhood_prompts) hash.update(prompt + '\n');
    for (const auto& [key, probes] : fact.locality)
      for (const auto& probe : probes) hash.update(probe.prompt + '\n');
  }
  return hash.hex();
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
    auto evaluation = json::parse(text->second).get<Evaluation>();
    for (const auto& [name, info] : file->tensors()) evaluation.kept[name] = file->tensor(name).clone();
    return evaluation;
  } catch (const std::exception& error) {
    log.warning("evaluation.cache", std::string("the stored evaluation is damaged and is made again: ") + error.what());
    return std::nullopt;
  }
}

}  // namespace

Judging::Judging(const datasets::FactSet& facts, const std::vector<std::string>& names, const EvaluateOptions& options,
                 const models::Model* model)
    : options_(options), context_{facts, options_, model}, metrics_(chosen(names, facts)) {
  if (!model) require_separate(resolve_metrics(names, facts));
  sheet_.front = options.front;
  for (const auto& metric : metrics_) metric->plan(context_, sheet_);
  scores_.resize(sheet_.requests().size());
}

void Judging::require_separate(const std::vector<std::string>& families) {
  for (const auto& name : families)
    if (!metric_info(name).alone)
      refuse({setting("eval"), name + ", for facts that are edited one at a time, each from the unedited model",
              "a family that judges one fact at a time, such as counterfact",
              "leave it out, or use " + setting("protocol", "sequential")});
}

void Judging::judge(const models::Model& model, size_t begin, size_t end) {
  std::vector<size_t> numbers, owners;
  std::vector<ScoreRequest> requests;
  for (size_t i = 0; i < scores_.size(); ++i) {
    const size_t fact = sheet_.cases()[i];
    if (fact < begin || fact >= end) continue;
    numbers.push_back(i);
    owners.push_back(fact);
    requests.push_back(sheet_.requests()[i]);
  }
  auto scores = requests.empty()     ? std::vector<Score>()
                : options_.reference ? score_reference(model, requests, owners, options_.scoring())
                                     : score_requests(model, requests, options_.scoring());
  for (size_t i = 0; i < numbers.size(); ++i) scores_[numbers[i]] = std::move(scores[i]);
  for (const auto& metric : metrics_) metric->observe(model, context_, begin, end);
}

Evaluation Judging::finish() {
  Evaluation evaluation;
  sheet_.fill(std::exchange(scores_, {}));
  evaluation.cases.assign(context_.facts.facts.size(), json::object());
  for (const auto& metric : metrics_) {
    options_.cancel.check("evaluation");
    const std::string& name = metric->info().name;
    MetricOutcome outcome = metric->finish(context_);
    evaluation.summary[name] = std::move(outcome.summary);
    for (size_t i = 0; i < outcome.cases.size(); ++i) evaluation.cases.at(i)[name] = std::move(outcome.cases[i]);
    evaluation.groups.resize(std::max(evaluation.groups.size(), outcome.groups.size()), json::object());
    for (size_t i = 0; i < outcome.groups.size(); ++i) evaluation.groups[i][name] = std::move(outcome.groups[i]);
    evaluation.kept.merge(outcome.kept);
  }
  return evaluation;
}

Evaluation evaluate(const models::Model& model, const datasets::FactSet& facts, const std::vector<std::string>& names,
                    const EvaluateOptions& options) {
  const std::string questions = questions_of(facts);
  const auto* before = options.before && !options.before->facts.empty() ? options.before : nullptr;
  if (before && before->facts != questions)
    refuse({"before", "an evaluation of other facts, or in another order", "one of these facts in this order",
            "evaluate the unedited model on the same list"});
  for (const auto& name : resolve_metrics(names, facts))
    if (before && !before->summary.contains(name))
      refuse({"before", "an evaluation without " + name, "one with the same families",
              "evaluate the unedited model with them"});
  Judging judging(facts, names, options, &model);
  judging.judge(model, 0, facts.facts.size());
  Evaluation evaluation = judging.finish();
  evaluation.facts = questions;
  return evaluation;
}

datasets::FactSet asked(datasets::FactSet facts, const Front& front) {
  for (auto& fact : facts.facts) {
    std::string text = front(fact.full_prompt());
    std::erase_if(text, [](char c) { return c == '{' || c == '}'; });  // the prompt has one "{}", the subject's place
    fact.prompt = text + fact.prompt;
  }
  return facts;
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

bool any_compared(std::span<const Efficacy> values) {
  return std::ranges::any_of(values, [](const Efficacy& one) { return one.nll_true.has_value(); });
}

std::optional<Mean> success_share(std::span<const Efficacy> values, bool compared) {
  std::vector<std::optional<double>> records;
  for (const auto& one : values)
    records.push_back(compared && !one.nll_true ? std::nullopt : std::optional(one.success() ? 1.0 : 0.0));
  return mean_of(records);
}

RetentionMatrix::RetentionMatrix() {
  for (const char* key :
       {"edits_applied", "success", "accuracy", "probability", "edited_success", "nll_new", "nll_true"})
    steps_[key] = json::array();
}

void RetentionMatrix::add(int64_t edits_applied, const std::vector<Efficacy>& values) {
  if (!empty() && steps_["nll_new"][0].size() != values.size())
    refuse({"retention", std::to_string(values.size()) + " facts",
            std::to_string(steps_["nll_new"][0].size()) + " as in the first step", "give all facts in every step"});
  const auto put = [&](const char* key, auto figure) { steps_[key].push_back(mapped(values, figure)); };
  put("success", [](const Efficacy& one) { return one.success() ? 1 : 0; });
  put("accuracy", [](const Efficacy& one) { return one.accurate ? 1 : 0; });
  put("probability", [](const Efficacy& one) { return std::round(one.probability * 1e4) / 1e4; });
  put("nll_new", &Efficacy::nll_new);
  put("nll_true", [](const Efficacy& one) { return detail::or_null(one.nll_true); });
  steps_["edits_applied"].push_back(edits_applied);
  const int64_t edited = std::min<int64_t>(edits_applied, std::ssize(values));
  const auto kept = success_share(std::span(values).first(edited), any_compared(values));
  steps_["edited_success"].push_back(kept ? json(100 * kept->value) : json());
}

void RetentionMatrix::cut(int64_t edits_applied) {
  while (edits() > edits_applied)
    for (json& column : steps_) column.erase(column.size() - 1);
}

RetentionMatrix RetentionMatrix::from_json(const json& json) {
  RetentionMatrix matrix;
  const auto& edits = detail::member(json, {"edits_applied"});
  const auto& fresh = detail::member(json, {"nll_new"});
  for (const auto& [key, column] : matrix.steps_.items()) {
    column = detail::member(json, {key});
    bool whole = column.is_array() && column.size() == edits.size() && fresh.is_array() && fresh.size() == edits.size();
    for (size_t step = 0; whole && step < column.size(); ++step) {
      const auto& row = column[step];
      if (key == "edits_applied")
        whole = row.is_number_integer();
      else if (key == "edited_success")
        whole = row.is_number() || row.is_null();
      else
        whole = row.is_array() && row.size() == fresh[0].size();
    }
    if (!whole)
      throw Error(ErrorClass::kCorruption, {"retention matrix", "no row of \"" + key + "\" for every step",
                                            "what RetentionMatrix::to_json writes", "run the evaluation again"});
  }
  return matrix;
}

Evaluation evaluate_before(const models::Model& model, const datasets::FactSet& facts,
                           const std::vector<std::string>& names, const EvaluateOptions& options,
                           const std::filesystem::path& cache, bool* from_cache) {
  if (from_cache) *from_cache = false;
  EvaluateOptions own = options;
  own.before = nullptr;
  if (cache.empty() || model.has_attachments() || own.front) return evaluate(model, facts, names, own);
  const std::string key = cache_key(model, facts, names, own).dump();
  const auto folder = cache / "evaluations";
  const auto path = folder / ("before-" + sha256_hex(key).substr(0, 32) + ".safetensors");
  auto stored = read_stored(path, key, options.log);
  if (options.sharing.all(stored.has_value())) {  // evaluated by all together if one lacks it
    if (from_cache) *from_cache = true;
    return std::move(*stored);
  }
  Evaluation evaluation = evaluate(model, facts, names, own);
  if (!options.sharing.first()) return evaluation;
  const std::string text = json(evaluation).dump(-1, ' ', false, json::error_handler_t::replace);
  const std::vector<std::pair<std::string, at::Tensor>> tensors(evaluation.kept.begin(), evaluation.kept.end());
  keep_if_possible(options.log, "evaluation.cache", [&] {
    std::filesystem::create_directories(folder);
    write_checked(path, tensors, {{"evaluation", text}, {"key", key}});
    prune_cache(folder, cache_limit(), path);
  });
  return evaluation;
}

std::vector<Continuation> continue_facts(const models::Model& model, const std::vector<datasets::Fact>& facts,
                                         int64_t new_tokens, const CancelToken& cancel,
                                         std::span<const Continuation> before) {
  if (facts.empty()) return {};
  std::vector<std::string> prompts;
  FreeTextOptions free;
  free.max_tokens = new_tokens;
  for (const auto& fact : facts) {
    const size_t i = prompts.size();
    prompts.push_back(fact.full_prompt());
    const auto answer = std::ssize(model.tokenizer().encode_ids(" " + fact.target_new));
    free.max_tokens = std::max(free.max_tokens, answer + 4);  // what follows tells whether the answer ends there
    auto& drafts = free.drafts.emplace_back();
    if (i < before.size()) drafts = {" " + fact.target_new, before[i].text};
  }
  const auto efficacies = evaluate_efficacy(model, facts, {.cancel = cancel});
  std::vector<Continuation> all;
  free.whole_sentence = false;
  free.cancel = cancel;
  auto texts = write_on(model, prompts, free);
  for (size_t i = 0; i < facts.size(); ++i) {
    std::string text = std::move(texts[i].text);
    while (text.ends_with("\uFFFD")) text.resize(text.size() - 3);  // of a character that was cut
    if (std::ssize(texts[i].ids) >= free.max_tokens) text += text.ends_with(' ') ? "…" : " …";
    all.push_back({prompts[i], std::move(text), efficacies[i].probability});
  }
  return all;
}

}  // namespace emend::evaluation
