// What a change of behaviour does: to the texts that it is about, and to everything else.
#pragma once

#include <emend/models/generation.h>
#include <emend/workflow/direct/scorer.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::workflow {

/// A behaviour that comes with emend: a contrast, questions, and a scorer.
struct DirectPreset {
  std::string name = {};
  std::vector<ContrastPrompt> positive = {}, negative = {};
  std::vector<ContrastPrompt> questions = {}, test_prompts = {};  ///< to search with; kept back, to judge with
  Scorer scorer = {};
};
/// Of datasets/emend_directions.json; without a name the questions that presets share. Throws Error(kInvalidArgument)
/// with the names.
[[nodiscard]] DirectPreset direct_preset(const std::string& name = "");
[[nodiscard]] std::vector<std::string> direct_preset_names();

/// Greedy continuations of rows by so many tokens, or to the end of the text. `drafts`: as models::generate takes them.
[[nodiscard]] std::vector<std::vector<int64_t>> continued(const models::Model& model,
                                                          const std::vector<std::vector<int64_t>>& rows, int64_t tokens,
                                                          const std::vector<models::Drafts>& drafts = {},
                                                          const Handles& lent = {});

struct EffectOptions {
  std::vector<ContrastPrompt> prompts;  ///< answered before and after
  std::vector<Scorer> scorers;
  int64_t max_new_tokens = 60;
  bool chat = true;
  std::filesystem::path health_data = {};  ///< folder for evaluate_health; empty: not measured
};
/// One state of a model: answers, and what it expects after neutral texts.
struct EffectReading {
  std::vector<std::string> texts;
  std::vector<std::vector<int64_t>> ids;  ///< of the texts
  std::map<std::string, double> scores;   ///< by those that read the model itself
  at::Tensor neutral_log_probs;
  std::vector<std::vector<int64_t>> neutral_ids;
  nlohmann::json health;
};
/// `before`: of the unchanged model; its answers are drafts.
[[nodiscard]] EffectReading read_effect(const models::Model& model, const EffectOptions& options,
                                        const Handles& lent = {}, const EffectReading* before = nullptr);
/// {"scores": {"wordiness": {"kind", "before", "after"}}, "neutral_kl": nats, "neutral_tokens_kept": percent of the
/// greedy continuations' tokens, "health": {"before", "after"}, "texts": [{"prompt", "before", "after"}]}. `judge`: the
/// unchanged model.
[[nodiscard]] nlohmann::ordered_json compare_effects(const EffectReading& before, const EffectReading& after,
                                                     const EffectOptions& options, const models::Model& judge,
                                                     const Handles& lent = {});
/// A table of what `compare_effects` gives, for people; nothing of null.
[[nodiscard]] std::string effect_text(const nlohmann::ordered_json& effect);

/// Token ids of prompts (of the questions that presets share, if there are none) with the model's own answers.
[[nodiscard]] std::vector<std::vector<int64_t>> answered(const models::Model& model,
                                                         std::vector<ContrastPrompt> prompts = {}, bool chat = true,
                                                         const Handles& lent = {}, int64_t tokens = 48);
/// What the model writes when it is asked for nothing, from common first words, sampled: `each` texts a word. Neutral
/// texts that nothing is measured on.
[[nodiscard]] std::vector<std::vector<int64_t>> own_writing(const models::Model& model, uint64_t seed,
                                                            const Handles& lent = {}, int64_t tokens = 48,
                                                            size_t each = 2);

}  // namespace emend::workflow
