#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/editors/steps/targets.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "support/editor_models.h"
#include "support/target_runs.h"

namespace emend {
namespace targets_test {

using editors::EditContext;
using editors::Engine;
using editors::StopRule;
using editors::TargetProblem;
using editors::TargetSpec;
using hooks::Site;
using testing::expect_engines_agree;
using testing::expect_equal_targets;
using testing::optimised;
using testing::problems_of;
using testing::relative_difference;
using testing::spec_of;
using testing::tiny_model;

TEST(Targets, FollowsAdamTheNormLimitAndTheStepCount) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  const auto problems = problems_of(model);
  TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  spec.steps = 7;
  for (const auto engine : {Engine::kFast, Engine::kReference}) {
    for (const auto& target : optimised(model, problems, spec, engine)) {
      EXPECT_EQ(target.steps, 6) << "one update fewer than iterations";
      EXPECT_EQ(target.curve.size(), 7U);
      const at::Tensor& steps = target.trace->delta_steps[0];
      const at::Tensor& grads = target.trace->grad_steps[0];
      EXPECT_EQ(steps[0].abs().max().item<double>(), 0);
      const double limit = spec.clamp_norm_factor * target.initial_D[0].norm().item<double>();
      at::Tensor first = at::zeros_like(steps[0]), second = at::zeros_like(steps[0]), delta = at::zeros_like(steps[0]);
      for (int64_t t = 1; t <= 6; ++t) {
        first = 0.9 * first + 0.1 * grads[t - 1];
        second = 0.999 * second + 0.001 * grads[t - 1].square();
        delta =
            delta - spec.lr * (first / (1 - std::pow(0.9, t))) / ((second / (1 - std::pow(0.999, t))).sqrt() + 1e-8);
        if (const double norm = delta.norm().item<double>(); norm > limit) delta = delta * (limit / norm);
        EXPECT_LT(relative_difference(steps[t], delta), 1e-9) << "update " << t;
      }
      EXPECT_LE(target.delta_D[0].norm().item<double>(), limit * (1 + 1e-9));
      EXPECT_TRUE(at::equal(target.target_D[0], target.initial_D[0] + target.delta_D[0]));
    }
  }
}

TEST(Targets, StopsBeforeTheUpdateOnceTheLossIsLow) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  const auto problems = problems_of(model);
  TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  spec.steps = 12;
  spec.clamp_norm_factor = 30;
  spec.weight_decay = 0;
  spec.stop_loss = 0;
  // A limit that some facts reach and others do not.
  std::vector<double> lowest;
  for (const auto& target : optimised(model, problems, spec, Engine::kReference))
    lowest.push_back(target.curve.back().loss);
  std::sort(lowest.begin(), lowest.end());
  spec.stop_loss = (lowest[1] + lowest[2]) / 2;
  const auto reference = expect_engines_agree(model, problems, spec, 1e-7, "a limit", {0, 2});
  std::set<int64_t> lengths;
  for (const auto& target : reference) {
    EXPECT_EQ(target.status == editors::FactStatus::kConverged, target.curve.back().loss < spec.stop_loss);
    for (size_t t = 0; t + 1 < target.curve.size(); ++t) EXPECT_GE(target.curve[t].loss, spec.stop_loss);
    EXPECT_EQ(static_cast<size_t>(target.steps) + 1, target.curve.size()) << "no update after the rule is met";
    lengths.insert(target.steps);
  }
  EXPECT_GT(lengths.size(), 1U) << "facts that leave at different steps are what this test is about";
}

TEST(Targets, StatusSaysWhetherTheNormLimitHeldTheTargetBack) {
  const models::Model model = tiny_model();
  const auto problems = problems_of(model);
  TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  spec.stop_loss = 0;
  for (const auto engine : {Engine::kFast, Engine::kReference}) {
    spec.clamp_norm_factor = 0.1;
    for (const auto& target : optimised(model, problems, spec, engine))
      EXPECT_EQ(target.status, editors::FactStatus::kClamped);
    spec.clamp_norm_factor = 1000;
    for (const auto& target : optimised(model, problems, spec, engine))
      EXPECT_EQ(target.status, editors::FactStatus::kMaxSteps);
  }
}

TEST(Targets, OtherStopRulesAgreeToo) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  // One label at the looked-up token itself: the random model can be made to say it.
  auto problems = problems_of(model, {editors::FactToken::kLast, {"{} is a"}});
  for (auto& problem : problems)
    for (auto& row : problem.rows) row.labels.resize(1);
  for (const auto rule : {StopRule::kArgmax, StopRule::kMostProbable, StopRule::kProbability}) {
    TargetSpec spec = spec_of({{Site::kMlpDownOut, 3}, {Site::kAttnOut, 3}}, 3);
    if (rule != StopRule::kArgmax) spec.sites.pop_back();
    spec.stop_probability = 0.3;
    spec.stop_rule = rule;
    spec.steps = 30;
    spec.clamp_norm_factor = 50;
    spec.weight_decay = 0;
    spec.kl_factor = 0.001;
    spec.stop_loss = 0;
    spec.patience = 2;
    for (const auto& target :
         expect_engines_agree(model, problems, spec, 1e-6, std::to_string(static_cast<int>(rule)))) {
      EXPECT_EQ(target.status, editors::FactStatus::kConverged) << static_cast<int>(rule);
      EXPECT_GT(target.steps, 1);
    }
  }
}

// Rows that begin with one another are run as one and still count as two.
TEST(Targets, WatchedStatesJoinTheLoss) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  auto problems = problems_of(model);
  problems[0].rows.push_back(problems[0].rows[1]);
  problems[0].rows.back().ids.pop_back();
  problems[0].rows.back().labels.pop_back();
  for (auto& row : problems[0].rows) row.weight = 1.0 / static_cast<double>(problems[0].rows.size());
  for (auto spec :
       {spec_of({{Site::kLayerOut, 1}}, 3), spec_of({{Site::kMlpOut, 0}, {Site::kAttnOut, 0}}, std::nullopt)}) {
    const auto without = optimised(model, problems, spec, Engine::kReference);
    spec.watched_layers = {2, 3};
    size_t asked = 0;
    spec.watched_loss = [&](const at::Tensor& states_LJD) {
      EXPECT_EQ(states_LJD.size(0), 2);
      asked += static_cast<size_t>(states_LJD.size(1));
      const at::Tensor weight_J = at::arange(1, states_LJD.size(1) + 1, at::kDouble);
      return 0.02 * (states_LJD.tanh().sum(2).sum(0).square() * weight_J).sum();
    };
    const auto reference = optimised(model, problems, spec, Engine::kReference);
    const size_t rows_of_a_run = std::exchange(asked, 0);
    expect_equal_targets(optimised(model, problems, spec, Engine::kFast), reference, 1e-8, "all at once");
    EXPECT_EQ(asked, rows_of_a_run);
    expect_equal_targets(optimised(model, problems, spec, Engine::kFast, 2), reference, 1e-8, "in batches");
    for (size_t i = 0; i < problems.size(); ++i)
      EXPECT_GT(relative_difference(reference[i].target_D[0], without[i].target_D[0]), 1e-3);
    spec.watched_layers = {spec.sites[0].layer};
    EXPECT_THROW(optimised(model, problems, spec, Engine::kFast), Error);
  }
}

TEST(Targets, HeldVectorsStayAdded) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  for (const auto& spec : {spec_of({{Site::kLayerOut, 1}}, 3), spec_of({{Site::kMlpOut, 1}}, std::nullopt),
                           spec_of({{Site::kMlpOut, 0}}, std::nullopt)}) {
    auto problems = problems_of(model);
    const auto without = optimised(model, problems, spec, Engine::kFast);
    for (auto& problem : problems) {
      for (size_t row = 0; row < problem.rows.size(); ++row) {
        if (problem.rows[row].lookup > 0)
          problem.held.push_back({row, problem.rows[row].lookup - 1, {testing::random_matrix(1, 32, row)[0]}});
        problem.held.push_back({row, problem.rows[row].lookup + 1, {testing::random_matrix(1, 32, row + 50)[0]}});
      }
    }
    const auto reference = expect_engines_agree(model, problems, spec, 1e-8, hooks::to_string(spec.sites[0]));
    EXPECT_GT(relative_difference(reference[0].delta_D[0], without[0].delta_D[0]), 1e-3) << "they do matter";
  }
}

TEST(Targets, JointProblemsAverageTheirRows) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  auto problems = problems_of(model);
  TargetProblem joint = problems[0];
  joint.rows.insert(joint.rows.end(), problems[3].rows.begin(), problems[3].rows.end());
  for (auto& row : joint.rows) row.weight /= 2;
  const TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  const auto reference = optimised(model, {joint}, spec, Engine::kReference);
  expect_equal_targets({optimised(model, {problems[1], joint}, spec, Engine::kFast).at(1)}, reference, 1e-8, "joint");
  const double alone = optimised(model, {problems[0]}, spec, Engine::kFast)[0].curve[0].nll,
               other = optimised(model, {problems[3]}, spec, Engine::kFast)[0].curve[0].nll;
  EXPECT_NEAR(reference[0].curve[0].nll, (alone + other) / 2, 1e-9);
}

TEST(Targets, FactsDoNotInfluenceEachOther) {
  const models::Model model = tiny_model();
  const auto problems = problems_of(model);
  const TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  const auto together = optimised(model, problems, spec, Engine::kFast);
  for (size_t i = 0; i < problems.size(); ++i) {
    const auto alone = optimised(model, {problems[i]}, spec, Engine::kFast);
    EXPECT_LT(relative_difference(together[i].target_D[0], alone[0].target_D[0]), 1e-3);
  }
}

TEST(Targets, AFactWithoutANumberFailsAlone) {
  const models::Model model = tiny_model();
  auto problems = problems_of(model);
  problems[1].held.push_back({0, problems[1].rows[0].lookup, {at::full({32}, std::nan(""))}});
  for (const auto engine : {Engine::kFast, Engine::kReference}) {
    const auto targets = optimised(model, problems, spec_of({{Site::kLayerOut, 1}}, 3), engine);
    EXPECT_EQ(targets[1].status, editors::FactStatus::kFailed);
    EXPECT_NE(targets[1].reason.find("not a number"), std::string::npos);
    for (const size_t i : {0U, 2U, 3U}) EXPECT_NE(targets[i].status, editors::FactStatus::kFailed) << i;
  }
}

TEST(Targets, RefusesWhatCannotBeOptimised) {
  const models::Model model = tiny_model();
  const auto problems = problems_of(model);
  const auto refused = [&](const std::vector<TargetProblem>& p, const TargetSpec& spec) {
    EditContext context;
    EXPECT_THROW((void)editors::optimise_targets(model, p, spec, context), Error);
  };
  refused(problems, spec_of({}, 3));
  refused(problems, spec_of({{Site::kMlpOut, 1}, {Site::kAttnOut, 2}}, 3));
  refused(problems, spec_of({{Site::kLayerOut, 4}}, 3));
  refused(problems, spec_of({{Site::kLayerOut, 2}}, 1));
  auto bad = problems;
  bad[0].rows[0].lookup = 99;
  refused(bad, spec_of({{Site::kLayerOut, 1}}, 3));
  bad = problems;
  bad[0].rows[0].labels[0].second = 5000;  // a token of another vocabulary
  refused(bad, spec_of({{Site::kLayerOut, 1}}, 3));
  bad = problems;
  bad[0].rows.clear();
  refused(bad, spec_of({{Site::kLayerOut, 1}}, 3));
}

TEST(Targets, CanBeCancelledAndReportsProgress) {
  const models::Model model = tiny_model();
  const auto problems = problems_of(model);
  for (const auto engine : {Engine::kFast, Engine::kReference}) {
    EditContext context;
    context.engine = engine;
    double done = 0;
    int updates = 0;
    context.progress = [&](const ProgressUpdate& update) {
      EXPECT_EQ(update.phase, "targets");
      done = update.done;
      ++updates;
    };
    (void)editors::optimise_targets(model, problems, spec_of({{Site::kLayerOut, 1}}, 3), context);
    EXPECT_EQ(done, 4);
    EXPECT_GE(updates, engine == Engine::kFast ? 6 : 4);  // steps as well as facts
    context.cancel.request();
    EXPECT_THROW((void)editors::optimise_targets(model, problems, spec_of({{Site::kLayerOut, 1}}, 3), context), Error);
    EXPECT_TRUE(model.hooks().at({Site::kLayerOut, 1}).idle());
  }
}

}  // namespace targets_test
}  // namespace emend
