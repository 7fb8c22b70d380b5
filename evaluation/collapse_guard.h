// Watches a model while batch after batch is written into it, and says when it stops being a language model.
//
//   const CollapseGuard guard(model, limits);          // before the first edit: keeps what the model said
//   const GuardReading reading = guard.read(model, relative_update, condition);
//   if (!reading.alarms.empty()) …                     // take the batch back, stop, or go on
//
// Three figures tell: how far the next-token distributions on prompts that have nothing to do with the facts have moved
// since the beginning, how large a batch's update is beside its weight, and how badly conditioned the solved systems
// were.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/evaluation/scoring.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::evaluation {

/// Values above which the guard raises an alarm; 0 switches a limit off.
struct GuardLimits {
  double divergence = 3.0;       ///< mean KL(unedited ‖ edited) over probe_prompts(), in nat
  double relative_update = 2.0;  ///< ‖ΔW‖/‖W‖ of one batch in one weight
  double condition = 0;          ///< of a solved system
};

/// The state after one batch.
struct GuardReading {
  double divergence = 0;            ///< nat; infinite if the model gives values that are not finite
  double relative_update = 0;       ///< largest over the batch's weights
  double condition = 0;             ///< largest over the batch's systems
  std::vector<std::string> alarms;  ///< one sentence for each limit that is exceeded; empty: all is well
};
[[nodiscard]] nlohmann::json to_json(const GuardReading& reading);  ///< the members by their names
[[nodiscard]] GuardReading guard_reading_from_json(const nlohmann::json& json);

class CollapseGuard {
 public:
  /// Keeps the next-token distributions of `unedited` on probe_prompts(): [32, V] float32 on the host.
  CollapseGuard(const models::Model& unedited, GuardLimits limits);

  /// The figures of `model` after a batch. `relative_update` is the largest ‖ΔW‖/‖W‖ of its weights, `condition` the
  /// largest condition number of the systems solved for it.
  [[nodiscard]] GuardReading read(const models::Model& model, double relative_update, double condition) const;

 private:
  GuardLimits limits_;
  at::Tensor before_PV_;
};

}  // namespace emend::evaluation
