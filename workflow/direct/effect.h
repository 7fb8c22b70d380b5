// What a change of behaviour does: to the texts that it is about, and to everything else.
#pragma once

#include <emend/workflow/direct/directions.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::workflow {

/// A number for a set of texts.
struct Scorer {
  std::string name;
  /// "rate": occurrences of the words in 100 words of text. "any": percent of the texts that hold one of them.
  /// "length": words a text.
  std::string kind = "rate";
  std::vector<std::string> words = {};  ///< or phrases; compared without case and punctuation, as whole words

  [[nodiscard]] double score(const std::vector<std::string>& texts) const;  ///< 0 without texts
};
/// {"name": "…", "kind": "rate|any|length", "words": ["…"]}. Throws Error(kCorruption) naming file and member.
[[nodiscard]] Scorer read_scorer(const std::filesystem::path& path);

/// A behaviour that comes with emend: two instructions to contrast over shared questions, and a scorer.
struct DirectPreset {
  std::string name = {}, about = {};
  std::vector<ContrastPrompt> positive = {}, negative = {};
  Scorer scorer = {};
};
/// Of datasets/emend_directions.json. Throws Error(kInvalidArgument) with the names.
[[nodiscard]] DirectPreset direct_preset(const std::string& name);
[[nodiscard]] std::vector<std::string> direct_preset_names();
/// Questions that no preset is fitted on.
[[nodiscard]] std::vector<ContrastPrompt> direct_test_prompts();

struct EffectOptions {
  std::vector<ContrastPrompt> prompts;  ///< answered before and after
  std::vector<Scorer> scorers;
  int64_t max_new_tokens = 60;
  bool chat = true;
  std::filesystem::path health_data = {};  ///< folder for evaluate_health; empty: not measured
  int64_t health_limit = 100;
};
/// One state of a model: answers, and what it expects after neutral texts.
struct EffectReading {
  std::vector<std::string> texts;
  at::Tensor neutral_log_probs;
  std::vector<std::vector<int64_t>> neutral_ids;
  nlohmann::json health;
};
[[nodiscard]] EffectReading read_effect(const models::Model& model, const EffectOptions& options,
                                        const Handles& lent = {});
/// {"scores": {"wordiness": {"kind", "before", "after"}}, "neutral_kl": nats, "neutral_tokens_kept": percent of the
/// greedy
///  continuations' tokens, "health": {"before", "after"}, "texts": [{"prompt", "before", "after"}]}
[[nodiscard]] nlohmann::ordered_json compare_effects(const EffectReading& before, const EffectReading& after,
                                                     const EffectOptions& options);

/// Token ids of neutral texts as the model itself continues them: what bake fits its keys to.
[[nodiscard]] std::vector<std::vector<int64_t>> neutral_texts(const models::Model& model, const Handles& lent = {},
                                                              int64_t tokens = 48);

}  // namespace emend::workflow
