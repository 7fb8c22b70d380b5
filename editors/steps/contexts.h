// Context templates: short sentences put in front of a prompt so that a fact does not depend on standing alone.
//
// Goals: an input that is recorded and can be given back, so that two runs (or another implementation) use the same
// ones; sampled only when none are given, from this model, with a seed. Non-goal: a process-wide cache.
#pragma once

#include <emend/core/log.h>
#include <emend/models/model.h>

namespace emend::editors {

/// Groups of templates with one "{}" each, the place of the prompt. Keys are averaged within a group, then over groups.
/// MEMIT: [["{}"], [5 strings]]; ROME: one group of 21. The very first template is the plain "{}".
struct ContextTemplates {
  std::vector<std::vector<std::string>> groups;
  bool sampled = false;  ///< made by sample_contexts
  uint64_t seed = 0;     ///< if sampled

  [[nodiscard]] std::vector<std::string> flat() const;  ///< all groups in one list
  [[nodiscard]] size_t size() const;                    ///< templates in all groups
  [[nodiscard]] nlohmann::json to_json() const;         ///< as parse_contexts reads it
  /// Only the plain prompt.
  [[nodiscard]] static ContextTemplates plain() { return {{{"{}"}}, false, 0}; }
};

/// A flat list (one group, of which kPlainApart takes the plain prompt out) or a list of lists. Throws
/// Error(kInvalidArgument), naming `where` and the entry, unless the first is "{}" and each has exactly one "{}".
[[nodiscard]] ContextTemplates parse_contexts(const nlohmann::json& json, const std::string& where);

enum class ContextGrouping {
  kPlainApart,  ///< MEMIT: the plain prompt is a group of its own
  kOneGroup,    ///< ROME: all alike
};

/// Samples templates as the published code does: seeds "The", "Therefore", "Because", "I", "You"; for each (length,
/// count) pair, count/5 continuations of each seed (at least one) up to `length` tokens in all, top-k 5; NFKD, blank
/// lines to spaces, special tokens and braces removed, ". {}" appended. Texts repeat if the model repeats itself. Equal
/// seeds give equal templates.
[[nodiscard]] ContextTemplates sample_contexts(const models::Model& model,
                                               const std::vector<std::vector<int64_t>>& length_params,
                                               ContextGrouping grouping, uint64_t seed, const Log& log = {});

}  // namespace emend::editors
