// Placements over several devices, for LoadOptions::place.
#pragma once

#include <emend/models/checkpoint.h>
#include <emend/models/config.h>

#include "support/simulated.h"

namespace emend::testing {

/// Layers on sim:1, sim:2, sim:0 in turn; the position table, the final norm and the head away from their neighbours.
inline devices::PlacementPlan spread_plan(const models::ModelConfig& config, const models::Checkpoint&) {
  devices::PlacementPlan plan;
  plan.embedding = sim(0);
  plan.position = sim(1);
  for (int64_t l = 0; l < config.n_layers; ++l) plan.layers.push_back(sim(static_cast<int>((l + 1) % 3)));
  plan.final_norm = sim(0);
  plan.head = sim(2);
  plan.tied_copy = config.tied_head;
  return plan;
}

/// The embedding on the first of these devices, the layers over all of them in equal runs, the head on the last.
inline auto over_devices(std::vector<c10::Device> all) {
  return [all = std::move(all)](const models::ModelConfig& config, const models::Checkpoint&) {
    auto plan = devices::PlacementPlan::single(all.front(), config.n_layers);
    for (int64_t l = 0; l < config.n_layers; ++l)
      plan.layers[static_cast<size_t>(l)] = all[static_cast<size_t>(l * std::ssize(all) / config.n_layers)];
    plan.final_norm = plan.head = all.back();
    plan.tied_copy = config.tied_head && plan.head != plan.embedding;
    return plan;
  };
}

}  // namespace emend::testing
