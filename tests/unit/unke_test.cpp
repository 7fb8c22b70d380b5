// UnKE against its formulas: the first step of AdamW from slopes by finite differences of a loss that is computed here,
// and where the block ends up.
#include <ATen/ATen.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/locate.h>
#include <emend/editors/steps/targets.h>
#include <emend/hooks/hook_session.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/editor_models.h"
#include "support/sequential_editors.h"

namespace emend {
namespace unke_test {

using hooks::Site;
using testing::relative_difference;

constexpr int kLayer = 1, kTexts = 3;
const std::string kSettings = "layers: [1]\nv_num_grad_steps: 12\nv_lr: 0.2\nex_data_num: 3\n";

std::vector<datasets::Fact> facts() {
  auto all = testing::tiny_facts();
  all.resize(2);
  return all;
}

editors::RenderedFact plain(const models::Model& model, const datasets::Fact& fact) {
  return editors::render_prompts(model.tokenizer(), fact, editors::ContextTemplates::plain(),
                                 {editors::FactToken::kLast, {}});
}

// One row alone: what enters or leaves the block.
at::Tensor at_site(const models::Model& model, Site site, const std::vector<int64_t>& ids) {
  hooks::HookSession session(model.hooks());
  session.capture({site, kLayer}).attach();
  (void)model.forward(models::TokenBatch::from_rows({ids}));
  return session.captured({site, kLayer});
}

struct Goal {
  std::vector<std::vector<int64_t>> prompts, texts;
  std::vector<at::Tensor> prompts_ND, texts_ND;  // what the block is to give
};

Goal goal_of(const models::Model& model) {
  Goal goal;
  std::vector<editors::TargetProblem> problems;
  for (const auto& fact : facts()) {
    problems.push_back(editors::make_target_problem(plain(model, fact)));
    goal.prompts.push_back(plain(model, fact).rows[0].ids);
  }
  const auto targets = editors::optimise_targets(model, problems,
                                                 {.sites = {{Site::kLayerOut, kLayer}},
                                                  .loss_layer = model.n_layers() - 1,
                                                  .steps = 12,
                                                  .lr = 0.2,
                                                  .weight_decay = 1e-3,
                                                  .clamp_norm_factor = 4,
                                                  .stop_loss = 0},
                                                 {});
  for (size_t i = 0; i < targets.size(); ++i) {
    goal.prompts_ND.push_back(at_site(model, Site::kLayerOut, goal.prompts[i]));
    goal.prompts_ND.back()[-1].copy_(targets[i].target_D[0]);
  }
  for (const auto& text : editors::text_rows(model, kTexts * 64, {}))
    for (size_t at = 0; at < text.size() && goal.texts.size() < kTexts; at += 64) {
      goal.texts.emplace_back(text.begin() + static_cast<int64_t>(at),
                              text.begin() + static_cast<int64_t>(std::min(text.size(), at + 64)));
      goal.texts_ND.push_back(at_site(model, Site::kLayerOut, goal.texts.back()));
    }
  return goal;
}

double mean_square(const models::Model& model, const std::vector<std::vector<int64_t>>& rows,
                   const std::vector<at::Tensor>& wanted) {
  double sum = 0, count = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    sum += (at_site(model, Site::kLayerOut, rows[i]) - wanted[i]).square().sum().item<double>();
    count += static_cast<double>(wanted[i].numel());
  }
  return sum / count;
}

double loss_of(const models::Model& model, const Goal& goal) {
  return mean_square(model, goal.prompts, goal.prompts_ND) + mean_square(model, goal.texts, goal.texts_ND);
}

TEST(Unke, FirstStepIsAdamWsOnTheTwoMeans) {
  constexpr double kRate = 1e-3, kDecay = 0.01, kNear = 1e-5;
  auto model = testing::tiny_model({.dtype = at::kDouble});
  const Goal goal = goal_of(model);
  ASSERT_EQ(goal.texts.size(), static_cast<size_t>(kTexts));
  const auto before = testing::all_weights(model);
  const auto result =
      testing::tiny_editor("unke", kSettings + "lr: 1e-3\noptim_num_step: 1\n", model)->edit(model, facts(), {});
  const auto after = testing::all_weights(model);
  auto probe = testing::tiny_model({.dtype = at::kDouble});
  size_t matrices = 0, clear = 0;
  for (const auto& delta : result.deltas) {
    ++matrices;
    const at::Tensor first = before.at(delta.weight),
                     step = (first * (1 - kRate * kDecay) - after.at(delta.weight)) / kRate;
    EXPECT_LE(step.abs().max().item<double>(), 1 + 1e-6) << delta.weight;
    for (int64_t place = 0; place < 4; ++place) {
      const int64_t row = place % first.size(0), column = (place * 5) % first.size(1);
      at::Tensor entry = probe.weight(delta.weight).detach()[row][column];
      const double value = entry.item<double>();
      entry.fill_(value + kNear);
      const double above = loss_of(probe, goal);
      entry.fill_(value - kNear);
      const double below = loss_of(probe, goal);
      entry.fill_(value);
      const double slope = (above - below) / (2 * kNear);
      if (std::abs(slope) < 1e-6) continue;
      ++clear;
      EXPECT_NEAR(step[row][column].item<double>(), slope / (std::abs(slope) + 1e-8), 1e-2) << delta.weight;
    }
  }
  EXPECT_EQ(matrices, 7U) << "four of attention, three of the MLP";
  EXPECT_GT(clear, 20U);
}

TEST(Unke, TheBlockGivesTheTargetsAndWhatItGaveForText) {
  auto model = testing::tiny_model({.dtype = at::kDouble});
  const Goal goal = goal_of(model);
  const double begin = loss_of(model, goal);
  const auto before = testing::all_weights(model);
  (void)testing::tiny_editor("unke", kSettings + "lr: 3e-3\noptim_num_step: 400\n", model)->edit(model, facts(), {});
  EXPECT_LT(loss_of(model, goal), begin / 20);
  for (const auto& [name, value] : testing::all_weights(model))
    EXPECT_EQ(at::equal(value, before.at(name)), name.find("layers.1.") == std::string::npos || value.dim() == 1)
        << name;
}

}  // namespace unke_test
}  // namespace emend
