// Placements of tiny models over simulated devices, and the runs that must not depend on them.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/placement.h>
#include <emend/devices/route.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/generation.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <random>
#include <set>
#include <string>
#include <vector>

#include "support/hash_tokenizer.h"
#include "support/simulated.h"

namespace emend::testing {

/// A way to place a model, with a name for messages.
struct NamedPlan {
  std::string name;
  devices::PlacementPlan plan;
};

/// What decides the set of placements.
struct PlacedShape {
  int64_t n_layers = 0;
  bool tied = false;
  bool positions = false;  ///< a learned position table
};

inline NamedPlan finish_plan(std::string name, devices::PlacementPlan plan, const PlacedShape& shape) {
  if (!shape.positions) plan.position = plan.embedding;
  plan.tied_copy = shape.tied && plan.head != plan.embedding;
  return {std::move(name), std::move(plan)};
}

/// Every cut between two devices (layers before the cut on sim:0, the others on sim:1), with the embedding and the head
/// each on either of them.
inline std::vector<NamedPlan> cut_plans(const PlacedShape& shape) {
  std::vector<NamedPlan> plans;
  for (int64_t cut = 0; cut <= shape.n_layers; ++cut)
    for (const int embedding : {0, 1})
      for (const int head : {0, 1}) {
        auto plan = devices::PlacementPlan::single(sim(0), shape.n_layers);
        for (int64_t l = cut; l < shape.n_layers; ++l) plan.layers[static_cast<size_t>(l)] = sim(1);
        plan.embedding = sim(embedding);
        plan.position = sim(1 - embedding);
        plan.head = sim(head);
        plan.final_norm = plan.layers.empty() ? sim(head) : plan.layers.back();
        plans.push_back(finish_plan("cut before layer " + std::to_string(cut) + ", embedding on sim:" +
                                        std::to_string(embedding) + ", head on sim:" + std::to_string(head),
                                    plan, shape));
      }
  return plans;
}

/// The parts dealt out to K devices, for K = 3, 4, 8: one after the other, and in the opposite order.
inline std::vector<NamedPlan> dealt_plans(const PlacedShape& shape) {
  std::vector<NamedPlan> plans;
  for (const int count : {3, 4, 8})
    for (const bool backwards : {false, true}) {
      int next = 0;
      const auto deal = [&] {
        const int k = next++ % count;
        return sim(backwards ? count - 1 - k : k);
      };
      devices::PlacementPlan plan;
      plan.embedding = deal();
      plan.position = deal();
      for (int64_t l = 0; l < shape.n_layers; ++l) plan.layers.push_back(deal());
      plan.final_norm = deal();
      plan.head = deal();
      plans.push_back(finish_plan(
          "dealt to " + std::to_string(count) + (backwards ? " devices, backwards" : " devices"), plan, shape));
    }
  return plans;
}

/// Any part on any device; some of the devices may be the host. The name holds the seed.
inline NamedPlan random_plan(const PlacedShape& shape, uint64_t seed) {
  std::mt19937_64 random(seed);
  const int count = std::vector<int>{2, 3, 4, 8}[random() % 4];
  const bool with_host = random() % 4 == 0;
  const auto any = [&] {
    const auto k = static_cast<int>(random() % static_cast<uint64_t>(count + with_host));
    return k == count ? c10::Device(c10::kCPU) : sim(k);
  };
  devices::PlacementPlan plan;
  plan.embedding = any();
  plan.position = any();
  for (int64_t l = 0; l < shape.n_layers; ++l) plan.layers.push_back(any());
  plan.final_norm = any();
  plan.head = any();
  return finish_plan("random map, seed " + std::to_string(seed) + ", " + std::to_string(count) + " devices" +
                         (with_host ? " and the host" : ""),
                     plan, shape);
}

/// The family's first debug flavour with a vocabulary of 257, so that the head is the largest matrix, and room for 64
/// generated tokens behind a prompt.
inline nlohmann::json placed_config(const std::string& family) {
  nlohmann::json config = debug_config(family);
  for (const auto& key : models::family_named(family).keys.vocab)
    if (config.contains(key)) config[key] = 257;
  for (const char* key : {"n_positions", "max_position_embeddings", "seq_length", "model_max_length"})
    if (config.contains(key) && config[key] == 64) config[key] = 160;
  return config;
}

inline PlacedShape placed_shape(const models::ModelConfig& config) {
  return {config.n_layers, config.tied_head, config.positions == models::Positions::kLearned};
}

/// A model of the configuration where `plan` says; without a plan on the host. The same weights every time.
inline models::Model placed_model(const nlohmann::json& config, const devices::PlacementPlan* plan = nullptr,
                                  at::ScalarType dtype = at::kFloat) {
  models::LoadOptions options{.dtype = dtype};
  if (plan) options.place = [plan](const models::ModelConfig&, const models::Checkpoint&) { return *plan; };
  return models::load_model(hashed_checkpoint(models::random_checkpoint(config, 17)), options);
}

inline models::TokenBatch placed_batch() {
  return models::TokenBatch::from_rows({{3, 17, 240, 2, 2, 71, 9}, {8}, {11, 12, 213, 14}});
}

/// δ at one token of a layer's MLP output, as editors add it, and the gradient of a target's −log p. The delta's home
/// is the host.
inline std::pair<at::Tensor, at::Tensor> logits_and_delta_gradient(const models::Model& model, int layer) {
  const auto batch = placed_batch();
  const bool dense = model.config().no_edit_site.empty();
  at::Tensor delta = at::full({model.hidden_size()}, 0.01, model.dtype()).requires_grad_(true);
  hooks::HookSession session(model.hooks());
  session.edit({dense ? hooks::Site::kMlpDownOut : hooks::Site::kMlpOut, layer}, [&](const at::Tensor& x) {
    const at::Tensor row = devices::route_like(delta, x, devices::Purpose::kDelta).unsqueeze(0);
    return x.index_add(0, devices::route_like(at::tensor({batch.token(0, 2)}, at::kLong), x, devices::Purpose::kInput),
                       row);
  });
  session.attach();
  const at::Tensor logits = model.forward(batch).logits;
  session.finish();
  const at::Tensor loss = -at::log_softmax(logits[batch.token(0, 4)], -1)[5];
  return {logits.detach(), torch::autograd::grad({loss}, {delta})[0]};
}

inline std::vector<std::vector<int64_t>> generate_some(const models::Model& model, int64_t tokens) {
  return models::generate(model, {{3, 17, 240, 2, 9}, {8, 11}}, {.max_new_tokens = tokens});
}

inline constexpr int kRandomMaps = 6;

/// Of every family in families.def.
inline std::vector<std::string> all_family_names() {
  std::vector<std::string> names;
  for (const auto& family : models::all_families()) names.push_back(family.name);
  return names;
}

/// All of the above for one family.
inline std::vector<NamedPlan> plans_of(const std::string& family, const PlacedShape& shape) {
  auto plans = cut_plans(shape);
  for (auto& plan : dealt_plans(shape)) plans.push_back(std::move(plan));
  const auto base = std::hash<std::string>()(family) % 100000;
  for (uint64_t k = 0; k < kRandomMaps; ++k) plans.push_back(random_plan(shape, base + k));
  return plans;
}

/// Purposes of which nothing as large as a head or as all logits may travel; second moments and snapshots of a matrix
/// are as large as they are.
inline const std::vector<devices::Purpose> kSmall = {
    devices::Purpose::kInput, devices::Purpose::kHidden,    devices::Purpose::kTable, devices::Purpose::kLabels,
    devices::Purpose::kLoss,  devices::Purpose::kDelta,     devices::Purpose::kKeys,  devices::Purpose::kCache,
    devices::Purpose::kHost,  devices::Purpose::kOptimiser, devices::Purpose::kOther};

inline void expect_small_transfers(const devices::TransferScope& scope, int64_t limit, const std::string& what) {
  for (const devices::Purpose purpose : kSmall)
    EXPECT_LT(scope.total(purpose).largest, limit) << what << ": " << devices::to_string(purpose);
  for (const devices::Purpose purpose : {devices::Purpose::kLogits, devices::Purpose::kWeight})
    EXPECT_EQ(scope.total(purpose).count, 0) << what << ": " << devices::to_string(purpose) << " travelled";
}

}  // namespace emend::testing
