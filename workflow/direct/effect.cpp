#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/text.h>
#include <emend/datasets/directions.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/health.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/direct/effect.h>

#include <algorithm>

namespace emend::workflow {
namespace {

using nlohmann::json;

constexpr int64_t kNeutralTokens = 12;  // of each greedy continuation that is compared

// " the words of a text " in one form, so that whole words are found by their blanks.
std::string spaced(std::string_view text) {
  std::string words = " ";
  for (const char c : lower(text)) {
    const bool letter = std::isalnum(static_cast<unsigned char>(c)) || c == '\'' || (c & 0x80);
    if (letter)
      words += c;
    else if (words.back() != ' ')
      words += ' ';
  }
  return words.back() == ' ' ? words : words + " ";
}

int64_t count_words(const std::string& spaced_text) {
  return std::count(spaced_text.begin(), spaced_text.end(), ' ') - 1;
}

int64_t occurrences(const std::string& spaced_text, const std::vector<std::string>& words) {
  int64_t found = 0;
  for (const auto& word : words) {
    const std::string wanted = spaced(word);
    if (wanted.size() < 2) continue;
    for (size_t at = spaced_text.find(wanted); at != std::string::npos; at = spaced_text.find(wanted, at + 1)) ++found;
  }
  return found;
}

Scorer scorer_of(const json& object, const std::string& where) {
  const auto refuse = [&](const std::string& got, const std::string& expected) {
    throw Error(ErrorClass::kCorruption, {where, got, expected, "docs/directions.md shows one"});
  };
  Scorer scorer;
  try {
    scorer.name = object.at("name");
    scorer.kind = object.value("kind", scorer.kind);
    scorer.words = object.value("words", scorer.words);
  } catch (const json::exception& error) {
    refuse(std::string("no scorer (") + error.what() + ")",
           "{\"name\": \"…\", \"kind\": \"rate\", \"words\": [\"…\"]}");
  }
  if (scorer.kind != "rate" && scorer.kind != "any" && scorer.kind != "length" && scorer.kind != "loops")
    refuse("kind \"" + scorer.kind + "\"", "rate, any, length or loops");
  if ((scorer.kind == "rate" || scorer.kind == "any") && scorer.words.empty()) refuse("no words", "at least one");
  return scorer;
}

const json& bundled_presets() {
  static const json document = parse_json(datasets::bundled_directions(), "emend_directions.json");
  return document;
}

std::vector<ContrastPrompt> with_system(const std::vector<std::string>& prompts, const std::string& system) {
  std::vector<ContrastPrompt> all;
  for (const auto& prompt : prompts) all.push_back({.prompt = prompt, .system = system});
  return all;
}

std::vector<std::vector<int64_t>> continued(const models::Model& model, const std::vector<std::vector<int64_t>>& rows,
                                            int64_t tokens, const Handles& lent) {
  models::GenerateOptions generate;
  generate.max_new_tokens = tokens;
  generate.stop_ids = model.tokenizer().eos_ids();
  generate.cancel = lent.cancel;
  return models::generate(model, rows, generate);
}

std::vector<std::vector<int64_t>> with_more(std::vector<std::vector<int64_t>> rows,
                                            const std::vector<std::vector<int64_t>>& more) {
  for (size_t i = 0; i < rows.size(); ++i) rows[i].insert(rows[i].end(), more[i].begin(), more[i].end());
  return rows;
}

std::vector<std::vector<int64_t>> neutral_rows(const models::Model& model) {
  std::vector<std::vector<int64_t>> rows;
  for (const auto& text : evaluation::probe_prompts()) rows.push_back(model.tokenizer().encode_ids(text, true));
  return rows;
}

}  // namespace

double Scorer::score(const std::vector<std::string>& texts) const {
  double found = 0, words_in_all = 0, with_any = 0, loop = 0;
  for (const auto& text : texts) {
    const std::string own = spaced(text);
    const int64_t here = occurrences(own, words);
    found += static_cast<double>(here);
    with_any += here > 0;
    loop += kind == "loops" && evaluation::loops(text);
    words_in_all += static_cast<double>(count_words(own));
  }
  const double n = std::max<double>(1, static_cast<double>(texts.size()));
  if (kind == "length") return words_in_all / n;
  if (kind == "loops") return 100 * loop / n;
  return kind == "any" ? 100 * with_any / n : 100 * found / std::max(1.0, words_in_all);
}

Scorer read_scorer(const std::filesystem::path& path) {
  return scorer_of(read_json(path), path.string());
}

std::vector<std::string> direct_preset_names() {
  std::vector<std::string> names;
  for (const auto& preset : bundled_presets().at("presets")) names.push_back(preset.at("name"));
  return names;
}

DirectPreset direct_preset(const std::string& name) {
  const auto questions = bundled_presets().at("questions").get<std::vector<std::string>>();
  for (const auto& preset : bundled_presets().at("presets")) {
    if (preset.at("name") != name) continue;
    return {name, preset.at("about"), with_system(questions, preset.at("positive")),
            with_system(questions, preset.at("negative")), scorer_of(preset.at("scorer"), "emend_directions.json")};
  }
  throw Error(ErrorClass::kInvalidArgument, {"preset", "\"" + name + "\"", "one of " + join(direct_preset_names()),
                                             did_you_mean(name, direct_preset_names())});
}

std::vector<ContrastPrompt> direct_questions() {
  return with_system(bundled_presets().at("questions").get<std::vector<std::string>>(), "");
}

std::vector<ContrastPrompt> direct_test_prompts() {
  return with_system(bundled_presets().at("test_questions").get<std::vector<std::string>>(), "");
}

std::vector<std::string> read_answers(const models::Model& model, const std::vector<ContrastPrompt>& prompts,
                                      int64_t max_new_tokens, bool chat, const Handles& lent) {
  std::vector<std::vector<int64_t>> rows;
  for (const auto& prompt : prompts) rows.push_back(prompt_ids(model, prompt, chat));
  std::vector<std::string> texts;
  for (const auto& ids : continued(model, rows, max_new_tokens, lent))
    texts.push_back(model.tokenizer().decode(ids, true));
  return texts;
}

EffectReading read_effect(const models::Model& model, const EffectOptions& options, const Handles& lent) {
  EffectReading reading;
  reading.texts = read_answers(model, options.prompts, options.max_new_tokens, options.chat, lent);
  reading.neutral_ids = continued(model, neutral_rows(model), kNeutralTokens, lent);
  evaluation::HealthOptions health;
  health.score.cancel = lent.cancel;
  health.score.progress = lent.progress;
  reading.neutral_log_probs = evaluation::next_token_log_probs(model, evaluation::probe_prompts(), health.score);
  if (!options.health_data.empty())
    reading.health = evaluation::evaluate_health(
        model, evaluation::load_health_tasks(options.health_data, options.health_limit), health);
  return reading;
}

nlohmann::ordered_json compare_effects(const EffectReading& before, const EffectReading& after,
                                       const EffectOptions& options) {
  nlohmann::ordered_json effect;
  effect["scores"] = nlohmann::ordered_json::object();
  for (const auto& scorer : options.scorers)
    effect["scores"][scorer.name] = {
        {"kind", scorer.kind}, {"before", scorer.score(before.texts)}, {"after", scorer.score(after.texts)}};
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
  if (prompts.empty()) prompts = direct_questions();
  std::vector<std::vector<int64_t>> rows;
  for (const auto& prompt : prompts) rows.push_back(prompt_ids(model, prompt, chat));
  return with_more(rows, continued(model, rows, tokens, lent));
}

std::vector<std::vector<int64_t>> own_writing(const models::Model& model, uint64_t seed, const Handles& lent,
                                              int64_t tokens) {
  std::vector<std::vector<int64_t>> rows;
  for (const char* word :
       {"The", "A",   "In",        "It",     "He",   "She",  "They", "We",    "This",     "There", "When",
        "If",  "For", "After",     "One",    "Many", "On",   "At",   "What",  "Some",     "As",    "But",
        "His", "No",  "According", "During", "To",   "From", "New",  "First", "Although", "You"})
    rows.insert(rows.end(), 2, model.tokenizer().encode_ids(word, true));
  models::GenerateOptions generate;
  generate.max_new_tokens = tokens;
  generate.temperature = 1;
  generate.top_p = 0.95;
  generate.seed = seed;
  generate.stop_ids = model.tokenizer().eos_ids();
  generate.cancel = lent.cancel;
  return with_more(rows, models::generate(model, rows, generate));
}

}  // namespace emend::workflow
