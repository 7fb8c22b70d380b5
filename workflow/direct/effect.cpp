#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/datasets/directions.h>
#include <emend/evaluation/health.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/direct/effect.h>

#include <algorithm>
#include <iterator>

namespace emend::workflow {
namespace {

using nlohmann::json;

constexpr int64_t kNeutralTokens = 12;  // of each greedy continuation that is compared

const json& bundled_presets() {
  static const json document = parse_json(datasets::bundled_directions(), "emend_directions.json");
  return document;
}

// Prompts as a preset has them: texts, objects, or the shared ones.
std::vector<ContrastPrompt> prompts_of(const json& preset, const char* key) {
  std::vector<ContrastPrompt> all;
  for (const auto& one : preset.contains(key) ? preset.at(key) : bundled_presets().at(key))
    all.push_back(one.is_string() ? ContrastPrompt{one.get<std::string>()}
                                  : ContrastPrompt{one.at("prompt"), one.value("system", ""), one.value("reply", "")});
  return all;
}

// One side of a contrast: prompts of its own, or a system message over the questions.
std::vector<ContrastPrompt> side_of(const json& preset, const char* side) {
  if (preset.at(side).is_array()) return prompts_of(preset, side);
  auto all = prompts_of(preset, "questions");
  for (auto& prompt : all) prompt.system = preset.at(side);
  return all;
}

std::vector<std::vector<int64_t>> with_more(std::vector<std::vector<int64_t>> rows,
                                            const std::vector<std::vector<int64_t>>& more) {
  for (size_t i = 0; i < rows.size(); ++i) rows[i].insert(rows[i].end(), more[i].begin(), more[i].end());
  return rows;
}

std::vector<std::vector<int64_t>> neutral_rows(const models::Model& model) {
  return mapped(evaluation::probe_prompts(),
                [&](const auto& text) { return model.tokenizer().encode_prompt(text).ids; });
}

}  // namespace

std::vector<std::string> direct_preset_names() {
  std::vector<std::string> names;
  for (const auto& preset : bundled_presets().at("presets")) names.push_back(preset.at("name"));
  return names;
}

DirectPreset direct_preset(const std::string& name) {
  if (name.empty()) return {.questions = prompts_of({}, "questions"), .test_prompts = prompts_of({}, "test_questions")};
  for (const auto& preset : bundled_presets().at("presets"))
    if (preset.at("name") == name)
      return {name,
              side_of(preset, "positive"),
              side_of(preset, "negative"),
              prompts_of(preset, "questions"),
              prompts_of(preset, "test_questions"),
              scorer_of(preset.at("scorer"), "emend_directions.json")};
  refuse({"preset", "\"" + name + "\"", "one of " + join(direct_preset_names()),
          did_you_mean(name, direct_preset_names())});
}

std::vector<std::vector<int64_t>> continued(const models::Model& model, const std::vector<std::vector<int64_t>>& rows,
                                            int64_t tokens, const std::vector<models::Drafts>& drafts,
                                            const Handles& lent) {
  constexpr size_t kAtOnce = 64;  // between them programs may be stopped
  models::GenerateOptions generate;
  generate.max_new_tokens = tokens;
  generate.stop_ids = model.tokenizer().eos_ids();
  generate.cancel = lent.cancel;
  std::vector<std::vector<int64_t>> all;
  for (size_t begin = 0; begin < rows.size(); begin += kAtOnce) {
    const auto part = [&](const auto& list) {
      const auto first = list.begin() + static_cast<std::ptrdiff_t>(std::min(begin, list.size()));
      const auto behind = list.begin() + static_cast<std::ptrdiff_t>(std::min(begin + kAtOnce, list.size()));
      return std::decay_t<decltype(list)>(first, behind);
    };
    if (lent.progress) lent.progress({"answers", static_cast<double>(begin), static_cast<double>(rows.size()), ""});
    auto some = models::generate(model, part(rows), generate, part(drafts));
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  return all;
}

EffectReading read_effect(const models::Model& model, const EffectOptions& options, const Handles& lent,
                          const EffectReading* before) {
  EffectReading reading;
  const auto drafts = [&](auto member) {
    std::vector<models::Drafts> all;
    if (before)
      for (const auto& ids : before->*member) all.push_back({ids});
    return all;
  };
  const auto rows = prompt_rows(model, options.prompts, options.chat);
  reading.ids = continued(model, rows, options.max_new_tokens, drafts(&EffectReading::ids), lent);
  for (const auto& ids : reading.ids) reading.texts.push_back(model.tokenizer().decode(ids, true));
  for (const auto& scorer : options.scorers)
    if (scorer.reads_model())
      reading.scores[scorer.name] = scorer.score({reading.texts, options.prompts, &model, options.chat, lent});
  reading.neutral_ids =
      continued(model, neutral_rows(model), kNeutralTokens, drafts(&EffectReading::neutral_ids), lent);
  const evaluation::ScoreOptions scoring{.progress = lent.progress, .cancel = lent.cancel};
  reading.neutral_log_probs = evaluation::next_token_log_probs(model, evaluation::probe_prompts(), scoring);
  if (!options.health_data.empty())
    reading.health = evaluation::evaluate_health(model, evaluation::load_health_tasks(options.health_data), scoring);
  return reading;
}

nlohmann::ordered_json compare_effects(const EffectReading& before, const EffectReading& after,
                                       const EffectOptions& options, const models::Model& judge, const Handles& lent) {
  nlohmann::ordered_json effect;
  effect["scores"] = nlohmann::ordered_json::object();
  const auto score = [&](const Scorer& scorer, const EffectReading& reading) {
    return scorer.reads_model() ? reading.scores.at(scorer.name)
                                : scorer.score({reading.texts, options.prompts, &judge, options.chat, lent});
  };
  for (const auto& scorer : options.scorers)
    effect["scores"][scorer.name] = {
        {"kind", scorer.kind}, {"before", score(scorer, before)}, {"after", score(scorer, after)}};
  int64_t kept = 0, all = 0;
  for (size_t i = 0; i < before.neutral_ids.size(); ++i)
    for (size_t k = 0; k < before.neutral_ids[i].size(); ++k, ++all)
      kept += k < after.neutral_ids[i].size() && before.neutral_ids[i][k] == after.neutral_ids[i][k];
  effect["neutral_kl"] = evaluation::mean_divergence(before.neutral_log_probs, after.neutral_log_probs);
  effect["neutral_tokens_kept"] = 100.0 * static_cast<double>(kept) / static_cast<double>(std::max<int64_t>(1, all));
  if (!before.health.is_null()) effect["health"] = {{"before", before.health}, {"after", after.health}};
  effect["texts"] = nlohmann::ordered_json::array();
  for (size_t i = 0; i < options.prompts.size(); ++i)
    effect["texts"].push_back(
        {{"prompt", options.prompts[i].prompt}, {"before", before.texts[i]}, {"after", after.texts[i]}});
  return effect;
}

std::vector<std::vector<int64_t>> answered(const models::Model& model, std::vector<ContrastPrompt> prompts, bool chat,
                                           const Handles& lent, int64_t tokens) {
  if (prompts.empty()) prompts = direct_preset().questions;
  const auto rows = prompt_rows(model, prompts, chat);
  return with_more(rows, continued(model, rows, tokens, {}, lent));
}

std::vector<std::vector<int64_t>> own_writing(const models::Model& model, uint64_t seed, const Handles& lent,
                                              int64_t tokens, size_t each) {
  std::vector<std::vector<int64_t>> rows;
  for (const char* word :
       {"The", "A",   "In",        "It",     "He",   "She",  "They", "We",    "This",     "There", "When",
        "If",  "For", "After",     "One",    "Many", "On",   "At",   "What",  "Some",     "As",    "But",
        "His", "No",  "According", "During", "To",   "From", "New",  "First", "Although", "You"})
    rows.insert(rows.end(), each, model.tokenizer().encode_prompt(word).ids);
  models::GenerateOptions generate;
  generate.max_new_tokens = tokens;
  generate.temperature = 1;
  generate.top_p = 0.95;
  generate.seed = seed;
  generate.stop_ids = model.tokenizer().eos_ids();
  generate.cancel = lent.cancel;
  return with_more(rows, models::generate(model, rows, generate));
}

std::string effect_text(const nlohmann::ordered_json& effect) {
  if (effect.is_null()) return "";
  TextTable table({"effect", "before", "after"});
  for (const auto& [name, one] : effect["scores"].items())
    table.add({name, short_number(one["before"]), short_number(one["after"])});
  if (effect.contains("health"))
    for (const auto& [name, value] : effect["health"]["before"].items())
      if (value.is_number()) table.add({name, short_number(value), short_number(effect["health"]["after"][name])});
  const std::string of = effect.contains("of") ? "effect of " + effect["of"].get<std::string>() + "\n" : "";
  return of + table.text() + "neutral texts: divergence " + short_number(effect["neutral_kl"]) + " nat a token, " +
         percent(effect["neutral_tokens_kept"].get<double>() / 100) + " of the tokens kept\n";
}

}  // namespace emend::workflow
