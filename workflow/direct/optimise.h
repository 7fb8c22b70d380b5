// How strongly a change of behaviour acts, and in which layers: found by trying.
//
// Each change is computed once, at strength 1. A trial gives every layer a share of it: the largest at one layer, less
// further away, none beyond a reach. What neutral texts lose is measured first; only a trial that loses little answers
// the prompts and is scored. Goals: the same trials from the same seed, also after a kill. Non-goals: gradients.
#pragma once

#include <emend/workflow/direct/change.h>
#include <emend/workflow/direct/effect.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <vector>

namespace emend::workflow {

struct OptimiseOptions {
  std::vector<ContrastPrompt> prompts;              ///< answered in every trial; others should judge what is found
  std::vector<std::vector<int64_t>> answered = {};  ///< their ids with the unchanged model's answers; none: found out
  /// What the model expects after these is to stay; none: beginnings of what it writes of itself.
  std::vector<ContrastPrompt> neutral = {};
  Scorer scorer;
  bool raise = false;  ///< a higher score is better; else a lower one
  int64_t max_new_tokens = 60;
  bool chat = true;
  int trials = 60;
  uint64_t seed = 0;
  double most = 1;                     ///< largest strength that is tried, above 0
  double max_kl = 0.05;                ///< nats a token on neutral texts, of the trial that is chosen
  nlohmann::json about;                ///< what else decides the result, for the journal
  std::filesystem::path journal = {};  ///< file that keeps every trial, so that a search goes on; empty: none
};

struct DirectTrial {
  int number = 0, change = 0;  ///< which of the changes
  double strength = 0;         ///< at `layer`; below 0 against the direction
  double layer = 0, reach = 0;
  double edge = 0;       ///< share of the strength that is left at the end of the reach
  double attention = 1;  ///< share of the strength that attention outputs get
  /// Of neutral texts; the least that it can be, where that was too much already; none where another trial was known
  /// to be better before all of them were read.
  std::optional<double> kl = {};
  /// Of the answers; none where the trial loses too much, its answers go round or break off, or it was known before
  /// its answers were complete that another trial scores as well and loses no more.
  std::optional<double> score = {};

  [[nodiscard]] double at(const DirectFigures& weight) const;  ///< how many times its change a weight gets
  [[nodiscard]] nlohmann::json to_json() const;                ///< a line of the journal
};

struct Optimum {
  double score_before = 0;
  std::vector<DirectTrial> trials;
  std::vector<int> front;     ///< of trials, from little lost to much; none of them is worse than another in both
  std::optional<int> chosen;  ///< the best score within max_kl, where one is better than before
  bool at_best = false;       ///< no score is better than that before: nothing was tried
};

/// Whether a journal holds all trials of its search, so that there is nothing to go on with but its end. Throws as
/// read_file.
[[nodiscard]] bool search_has_ended(const std::filesystem::path& journal);

/// Throws Error(kInvalidArgument) for no changes, trials or prompts, a `most` that is not above 0, and for a journal of
/// another search.
[[nodiscard]] Optimum optimise_strengths(models::Model& model, std::span<const DirectChange> changes,
                                         const OptimiseOptions& options, const Handles& lent = {});

}  // namespace emend::workflow
