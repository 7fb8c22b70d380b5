// What `emend direct` does, for programs and Python: from named files and figures to directions, changes and reports.
//
//   Options declared;
//   DirectOptions options;
//   declare_direct(declared, options);            // and fill it from a command line, or keyword arguments
//   const DirectJob job(options);                 // reads what needs no model
//   const DirectResult result = job.run(model, {});
#pragma once

#include <emend/core/option.h>
#include <emend/workflow/direct/change.h>
#include <emend/workflow/direct/effect.h>
#include <emend/workflow/direct/optimise.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::workflow {

/// All but the model.
struct DirectOptions {
  std::string action = {}, positive = {}, negative = {}, preset = {}, layers = {}, prompts = {}, texts = {}, spare = {},
              search_prompts = {}, neutral = {}, health_data = {}, out = {};
  std::vector<std::string> directions = {}, apart_from = {}, scorers = {}, save = {"pack"}, by = {"bake", "ablate"};
  FitOptions fit = {};
  DirectChangeOptions change = {};
  models::SteerOptions steer = {};
  EffectOptions effect = {};
  OptimiseOptions search = {};
  std::string where = "everywhere";
  bool no_chat = false, no_effect = false, force = false, resume = false;
};
/// fit, steer, ablate, bake, optimise.
[[nodiscard]] const std::vector<std::string>& direct_actions();
/// Declares every member, with the actions that it belongs to. `options` must outlive the parsing.
void declare_direct(Options& declared, DirectOptions& options);

struct DirectResult {
  nlohmann::ordered_json document;
  std::string text;  ///< the same for people
};

class DirectJob {
 public:
  /// Reads prompts, directions and scorers. Throws Error for what is wrong with them, or with options that do not go
  /// together, or if there is something at `out` that neither `force` nor `resume` allows for, or that cannot be
  /// replaced.
  explicit DirectJob(DirectOptions options);
  /// Refuses layers that this model lacks, and changes that its kind cannot have, before it is loaded. Throws
  /// Error(kInvalidArgument), Error(kUnsupported).
  void check(const models::Checkpoint& checkpoint) const;
  /// Writes `out`. The model is as it was when this returns.
  [[nodiscard]] DirectResult run(models::Model& model, const Handles& lent) const;

 private:
  [[nodiscard]] DirectResult fit(models::Model& model, const Handles& lent) const;
  void check_save(const models::Model& model) const;
  void warn_of_others(const models::Model& model, const Log& log) const;
  [[nodiscard]] DirectResult change(models::Model& model, const Handles& lent) const;
  [[nodiscard]] nlohmann::ordered_json measured(const models::Model& model, const Handles& lent,
                                                const std::function<std::shared_ptr<void>()>& change) const;
  [[nodiscard]] DirectChangeOptions change_options(const models::Model& model, bool bakes, const Handles& lent,
                                                   const std::vector<std::vector<int64_t>>& own = {}) const;
  [[nodiscard]] DirectChange steered(const models::Model& model) const;
  [[nodiscard]] DirectChange changed_by(const std::string& way, models::Model& model,
                                        const DirectChangeOptions& options, const Handles& lent) const;
  [[nodiscard]] DirectChange optimised(models::Model& model, const Handles& lent,
                                       nlohmann::ordered_json& document) const;

  DirectOptions options_;
  DirectPreset preset_;
  std::vector<Directions> directions_;
  std::vector<ContrastPrompt> texts_, spare_;
};

}  // namespace emend::workflow
