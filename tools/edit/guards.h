// What is checked before anything is computed, and after every batch.
#pragma once

#include <emend/editors/editor.h>
#include <emend/evaluation/collapse_guard.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "../cli.h"
#include "options.h"

namespace emend::tools {

/// Lints the facts, also against the model (is the target already its answer?), and logs what was found. With --fix the
/// facts come back with the clear fixes applied. `findings` gets one object a finding. Throws Error(kCorruption) if
/// --strict was given and a finding is an error that was not fixed.
[[nodiscard]] datasets::FactSet check_request(datasets::FactSet facts, const models::Model& model,
                                              const EditOptions& options, const Common& common,
                                              nlohmann::json& findings);

/// What to do with a batch after which the model looks broken.
enum class OnCollapse {
  kWarn,    ///< say so and go on
  kSkip,    ///< take the batch back, go on with the next
  kStop,    ///< take the batch back, leave the rest unedited, save what there is, exit with 4
  kRevert,  ///< take everything back and exit with 4
};
/// Throws Error(kInvalidArgument) naming --on-collapse.
[[nodiscard]] OnCollapse parse_on_collapse(const std::string& text);

/// Outcomes for facts that were not edited, or not kept.
[[nodiscard]] std::vector<editors::FactOutcome> failed_outcomes(std::span<const datasets::Fact> facts,
                                                                const std::string& reason);

/// Largest figures of a batch, for CollapseGuard::read.
[[nodiscard]] evaluation::GuardReading read_guard(const evaluation::CollapseGuard& guard, const models::Model& model,
                                                  const editors::EditResult& batch);

}  // namespace emend::tools
