// The patterns of guard_patterns_test.cpp that meet in training, editing, statistics and evaluation: 10, 11, 12, 13,
// 17, 18, 19, 22, 27, 29 and 30. emend's own path is right, and a deliberate mix of devices raises.
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/keys.h>
#include <emend/editors/steps/learning_pass.h>
#include <emend/editors/steps/lora.h>
#include <emend/editors/steps/optimiser.h>
#include <emend/editors/steps/solver.h>
#include <emend/editors/steps/targets.h>
#include <emend/editors/steps/transaction.h>
#include <emend/editors/steps/tuning.h>
#include <emend/evaluation/scoring.h>
#include <emend/models/model.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/guards.h"
#include "support/placements.h"

namespace emend {
namespace guard_patterns_editing_test {

using devices::PlacementPlan;
using devices::Purpose;
using testing::expect_error;
using testing::expect_mix_refused;
using testing::relative_difference;
using testing::sim;

const c10::Device kCpu(c10::kCPU);

at::Tensor on(c10::Device device, const at::Tensor& x) {
  return devices::route_to(x, device, Purpose::kOther);
}

/// Three layers on three devices, the head on a fourth.
PlacementPlan spread(c10::Device head = sim(3)) {
  PlacementPlan plan;
  plan.embedding = plan.position = sim(3);
  plan.layers = {sim(0), sim(1), sim(2)};
  plan.final_norm = sim(2);
  plan.head = head;
  return plan;
}

models::Model model_of(const PlacementPlan* plan = nullptr, at::ScalarType dtype = at::kFloat,
                       const std::string& family = "llama") {
  return testing::placed_model(testing::placed_config(family), plan, dtype);
}

std::vector<editors::LearningRow> learning_rows() {
  return {{{3, 17, 240, 2, 71}, {{1, 240}, {3, 71}}}, {{8, 9, 10}, {{2, 256}}}};
}

TEST(Guard, P10_LabelsGoToTheLogits) {
  const auto host = model_of();
  const auto expected = editors::LearningPass(host, learning_rows(), 0).measure().nll;
  for (const auto head : {kCpu, sim(0), sim(2), sim(3)}) {
    const auto plan = spread(head);
    const auto model = model_of(&plan);
    const editors::LearningPass pass(model, learning_rows(), 0);
    const devices::TransferScope scope;
    EXPECT_EQ(pass.measure().nll, expected);
    EXPECT_EQ(scope.total(Purpose::kLogits).count, 0) << "logits stay";
    EXPECT_LE(scope.total(Purpose::kLabels).largest, 3 * 8) << "three labels";
    EXPECT_EQ(scope.total(Purpose::kWeight).count, 0);
  }
  const at::Tensor logits = at::rand({3, 257}), labels = at::tensor({240, 71, 256}, at::kLong);
  expect_mix_refused([&] { (void)at::cross_entropy_loss(on(sim(1), logits), labels); });
  expect_mix_refused([&] { (void)on(sim(1), logits).gather(1, on(sim(0), labels).unsqueeze(1)); });
}

TEST(Guard, P11_ALabelOutsideTheVocabularyIsNamed) {
  // What a loss says by itself names neither text nor token, and on a GPU ends in a device-side assertion.
  try {
    (void)at::cross_entropy_loss(at::rand({2, 257}), at::tensor({5, 32000}, at::kLong));
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find("32000"), std::string::npos);
  }
  const auto plan = spread();
  auto model = model_of(&plan);
  std::vector<editors::TuningRow> rows = {{{{3, 17, 240}, {{1, 240}}}, 12}};
  editors::check_vocabulary(model, rows, "alpaca.json");
  rows[0].row.labels[0].second = 32000;
  expect_error(ErrorClass::kInvalidArgument, {"alpaca.json", "12", "32000", "257", "label"},
               [&] { editors::check_vocabulary(model, rows, "alpaca.json"); });
  editors::TargetProblem problem;
  problem.rows = {{{3, 17, 240}, 1, {{2, 32000}}, 1.0}};
  editors::TargetSpec spec;
  spec.sites = {{hooks::Site::kMlpOut, 0}};
  editors::EditContext context;
  expect_error(ErrorClass::kInvalidArgument, {"32000"},
               [&] { (void)editors::optimise_targets(model, {problem}, spec, context); });
}

TEST(Guard, P12_LossTermsOfThreeDevicesMeetAndGradientsComeBack) {
  const auto plan = spread();
  const auto host = model_of(nullptr, at::kDouble), placed = model_of(&plan, at::kDouble);
  // δ on sim:0, the loss read behind the layer on sim:2 with the head on sim:3, the decay where δ is.
  editors::TargetSpec spec;
  spec.sites = {{hooks::Site::kLayerOut, 0}};
  spec.loss_layer = 2;
  spec.steps = 5;
  spec.kl_factor = 0.5;
  std::vector<editors::TargetProblem> problems;
  for (const auto& fact : testing::tiny_facts())
    problems.push_back(editors::make_target_problem(
        editors::render_prompts(host.tokenizer(), fact, editors::ContextTemplates{{{"{}"}, {"so {}"}}, false, 0}, {})));
  for (const auto engine : {editors::Engine::kFast, editors::Engine::kReference}) {
    const auto run = [&](const models::Model& model) {
      editors::EditContext context;
      context.engine = engine;
      return editors::optimise_targets(model, problems, spec, context);
    };
    const auto expected = run(host);
    const devices::TransferScope scope;
    const auto got = run(placed);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_LT(relative_difference(got[i].delta_D[0], expected[i].delta_D[0]), 1e-12);
      EXPECT_GT(got[i].curve.back().kl, 0);
      EXPECT_GT(got[i].curve.back().weight_decay, 0);
      EXPECT_LT(got[i].curve.back().nll, got[i].curve.front().nll);
    }
    EXPECT_LT(scope.total(Purpose::kLoss).largest, 257 * 8) << "less than one row of logits";
    EXPECT_EQ(scope.total(Purpose::kLogits).count, 0);
  }
  // The gradient that came back is that of a finite difference.
  const int layer = 0;
  const auto [logits, gradient] = testing::logits_and_delta_gradient(placed, layer);
  const auto loss_with = [&](double change) {
    const at::NoGradGuard no_grad;
    const auto batch = testing::placed_batch();
    hooks::HookSession session(placed.hooks());
    session.edit({hooks::Site::kMlpDownOut, layer}, [&](const at::Tensor& x) {
      at::Tensor y = x.clone();
      y[batch.token(0, 2)].add_(0.01);
      y[batch.token(0, 2)][7].add_(change);
      return y;
    });
    session.attach();
    const at::Tensor out = devices::to_host(placed.forward(batch).logits);
    session.finish();
    return -at::log_softmax(out[batch.token(0, 4)], -1)[5].item<double>();
  };
  EXPECT_NEAR(gradient[7].item<double>(), (loss_with(1e-5) - loss_with(-1e-5)) / 2e-5, 1e-8);
  const at::Tensor term = at::scalar_tensor(1.5);
  expect_mix_refused([&] { (void)(on(sim(0), term) + on(sim(1), term)); });
}

TEST(Guard, P13_ADeltaGoesToTheTensorItIsAddedTo) {
  const auto plan = spread();
  const auto host = model_of(), placed = model_of(&plan);
  const auto batch = testing::placed_batch();
  const auto run = [&](const models::Model& model, int layer, c10::Device home, at::ScalarType dtype) {
    at::Tensor delta = on(home, at::full({32}, 0.25, dtype)).requires_grad_(true);
    hooks::HookSession session(model.hooks());
    session.edit({hooks::Site::kLayerOut, layer}, [&](const at::Tensor& x) {
      at::Tensor rows = at::zeros_like(x);
      rows[batch.token(0, 2)].copy_(at::ones_like(x[0]));
      return x + rows * devices::route_like(delta, x, Purpose::kDelta, devices::Dtype::kMatch);
    });
    session.attach();
    const at::Tensor logits = model.forward(batch).logits;
    session.finish();
    const auto gradient = torch::autograd::grad({logits.square().sum()}, {delta})[0];
    EXPECT_EQ(gradient.device(), home) << "a gradient comes back to its delta";
    EXPECT_EQ(gradient.scalar_type(), dtype);
    return std::pair(devices::to_host(logits.detach()), devices::to_host(gradient));
  };
  for (int layer = 0; layer < 3; ++layer)
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const auto expected = run(host, layer, kCpu, dtype);
      for (const auto home : {kCpu, sim(layer), sim((layer + 1) % 3), sim(7)}) {
        const auto got = run(placed, layer, home, dtype);
        EXPECT_TRUE(at::equal(got.first, expected.first)) << layer << " " << devices::to_string(home);
        EXPECT_TRUE(at::equal(got.second, expected.second)) << layer << " " << devices::to_string(home);
      }
    }
  // The published line: cur_out[i, idx, :] += delta.
  const at::Tensor out = on(sim(1), at::rand({4, 8})), delta = on(sim(0), at::rand({8}));
  expect_mix_refused([&] { out[2].add_(delta); });
  expect_mix_refused([&] { out.index_add_(0, on(sim(1), at::tensor({2}, at::kLong)), delta.unsqueeze(0)); });
}

TEST(Guard, P17_StatisticsKeysAndResidualMayBeAnywhere) {
  const at::Tensor keys = testing::random_matrix(48, 5, 3), cov = testing::random_spd(48, 4);
  const auto solve = [&](c10::Device keys_home, c10::Device cov_home, editors::SolveMethod method) {
    editors::Preserved preserved;
    preserved.moment = editors::SecondMoment(on(cov_home, cov), 100);
    preserved.lambda = 15;
    const at::Tensor answer = editors::solve_keys(on(keys_home, keys), preserved, {at::kDouble, method});
    EXPECT_EQ(answer.device(), keys_home);
    return devices::to_host(answer);
  };
  for (const auto method : {editors::SolveMethod::kDense, editors::SolveMethod::kPushThrough}) {
    const at::Tensor expected = solve(kCpu, kCpu, method);
    for (const auto keys_home : {kCpu, sim(0), sim(2)})
      for (const auto cov_home : {kCpu, sim(1), sim(2)})
        EXPECT_LT(relative_difference(solve(keys_home, cov_home, method), expected), 1e-9);
  }
  expect_mix_refused([&] { (void)at::linalg_solve(on(sim(0), cov), on(sim(1), keys)); });
  expect_mix_refused([&] { (void)at::cholesky_solve(on(sim(0), keys), on(sim(1), cov)); });
}

TEST(Guard, P18_SolvesAreInDoublePrecisionWhateverTheWeightsAre) {
  const at::Tensor half = testing::random_spd(16, 5).to(at::kHalf);
  EXPECT_THROW((void)at::linalg_inv(half), c10::Error) << "what a solve in the weights' dtype runs into";
  const auto factor = editors::SpdFactor::of(on(sim(1), half));
  EXPECT_EQ(factor.lower_FF().scalar_type(), at::kDouble);
  EXPECT_EQ(factor.lower_FF().device(), sim(1));
  // A bfloat16 weight gets the sum of double precision, rounded once: within half a unit in the last place.
  const auto plan = spread();
  for (const char* family : {"llama", "gpt2"}) {
    auto model = model_of(&plan, at::kBFloat16, family);
    const auto site = model.edit_site(1);
    const at::Tensor before = devices::to_host(model.weight(site.weight_name)).clone();
    const at::Tensor left = testing::random_matrix(site.out_features, 2, 6, at::kDouble) * 0.1,
                     right = testing::random_matrix(site.in_features, 2, 7, at::kDouble) * 0.1;
    editors::EditTransaction transaction(model);
    (void)editors::apply_delta(editors::WeightDelta::factors(site, left, right), transaction);
    const at::Tensor update = left.mm(right.t());
    const bool stored_in_out = site.orientation == models::Orientation::kInOut;
    const at::Tensor wanted = before.to(at::kDouble) + (stored_in_out ? update.t() : update);
    EXPECT_TRUE(at::equal(devices::to_host(model.weight(site.weight_name)), wanted.to(at::kBFloat16))) << family;
  }
}

TEST(Guard, P19_UpdatesGoToTheWeightAndOriginalsComeBack) {
  const auto plan = spread();
  for (const char* family : {"llama", "gpt2"}) {
    auto model = model_of(&plan, at::kFloat, family);
    const auto before = testing::all_weights(model);
    {
      editors::EditTransaction transaction(model);
      for (int l = 0; l < 3; ++l) {
        const auto site = model.edit_site(l);
        // From the host, from the weight's own device, and from another one.
        const auto home = std::vector<c10::Device>{kCpu, sim(1), sim(0)}[static_cast<size_t>(l)];
        (void)editors::apply_delta(
            editors::WeightDelta::factors(site, on(home, testing::random_matrix(site.out_features, 1, 8)),
                                          on(home, testing::random_matrix(site.in_features, 1, 9))),
            transaction);
        EXPECT_EQ(model.weight(site.weight_name).device(), sim(l));
      }
      EXPECT_EQ(testing::changed_weights(model, before).size(), 3U);
    }
    EXPECT_TRUE(testing::changed_weights(model, before).empty()) << "bit for bit, on every device";
    const at::Tensor weight = model.weight(model.edit_site(2).weight_name);
    expect_mix_refused([&] { weight.add_(on(sim(0), at::ones_like(weight))); });
    expect_error(ErrorClass::kInvalidArgument, {"sim:0", "sim:2", "route_like"},
                 [&] { model.set_weight(model.edit_site(2).weight_name, on(sim(0), weight)); });
    expect_error(ErrorClass::kInvalidArgument, {}, [&] {
      editors::EditTransaction transaction(model);
      auto wrong = editors::WeightDelta::dense(model.edit_site(2), at::ones({3, 3}));
      (void)editors::apply_delta(wrong, transaction);
    });
  }
}

TEST(Guard, P22_AdaptersLiveWithTheirWeights) {
  const auto plan = spread();
  auto placed = model_of(&plan), host = model_of();
  {
    editors::LoraShape shape;
    shape.target_modules = {"all-linear"};
    const editors::LoraAdapters adapters(placed, shape);
    const auto parameters = adapters.parameters();
    for (size_t i = 0; i < parameters.size(); ++i)
      EXPECT_EQ(parameters[i].device(), placed.weight(adapters.weights()[i / 2]).device()) << adapters.weights()[i / 2];
  }
  auto wrong = std::make_shared<models::LinearAdapter>();
  wrong->a_RI = on(sim(0), at::zeros({2, 32}));
  wrong->b_OR = on(sim(0), at::zeros({32, 2}));
  expect_error(ErrorClass::kInvalidArgument,
               {"layers.1.self_attn.q_proj", "factors on sim:0 and sim:0", "both on sim:"},
               [&] { placed.set_adapter("model.layers.1.self_attn.q_proj.weight", wrong); });
  std::vector<editors::TuningRow> rows;
  for (const auto& row : learning_rows()) rows.push_back({row, 1});
  editors::TuneOptions options;
  options.steps = 3;
  options.lr = 1e-2;
  const auto a = editors::tune(host, rows, options), b = editors::tune(placed, rows, options);
  ASSERT_EQ(a.deltas.size(), b.deltas.size());
  for (size_t i = 0; i < a.deltas.size(); ++i)
    EXPECT_LT(relative_difference(devices::to_host(b.deltas[i].matrix()), a.deltas[i].matrix()), 1e-6);
  EXPECT_GT(a.deltas[0].norm(), 0);
  const at::Tensor x = on(sim(1), at::rand({3, 32}));
  expect_mix_refused([&] { (void)at::linear(at::linear(x, wrong->a_RI), wrong->b_OR); });
}

TEST(Guard, P27_EvaluationUsesTheSamePlacement) {
  const auto plan = spread();
  const auto host = model_of(), placed = model_of(&plan);
  const std::vector<evaluation::ScoreRequest> requests = {
      {"the home of Ada is in", "Rome"}, {"the home of Ada is in", "Ulm by the river"}, {"Oslo lies near", "a sea"}};
  const auto expected = evaluation::score_requests(host, requests);
  const devices::TransferScope scope;
  const auto got = evaluation::score_requests(placed, requests);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].log_probs, expected[i].log_probs);
    EXPECT_EQ(got[i].predicted, expected[i].predicted);
  }
  EXPECT_EQ(scope.total(Purpose::kWeight).count, 0);
  EXPECT_LT(scope.total().largest, 257 * 32 * 4) << "nothing as large as the head";
}

TEST(Guard, P29_StatisticsAreThoseOfOneDevice) {
  const auto plan = spread();
  const auto host = model_of(), placed = model_of(&plan);
  const std::vector<std::vector<int64_t>> rows = {{3, 17, 240, 2, 71, 9, 60}, {8, 9, 10}, {11, 12}};
  for (const bool skip : {false, true}) {
    editors::StatisticsOptions options;
    options.first_token = skip ? editors::FirstToken::kSkip : editors::FirstToken::kCount;
    options.batch_tokens = 10;
    const auto expected = editors::collect_second_moments(host, rows, {0, 1, 2}, options);
    const auto got = editors::collect_second_moments(placed, rows, {0, 1, 2}, options);
    for (const int l : {0, 1, 2}) {
      EXPECT_EQ(got.at(l).count(), skip ? 9 : 12);
      EXPECT_TRUE(at::equal(devices::to_host(got.at(l).cov_FF()), expected.at(l).cov_FF())) << l;
    }
  }
  const at::Tensor keys = on(sim(1), at::rand({4, 8}));
  expect_mix_refused([&] { (void)keys.masked_select(on(sim(0), at::ones({4, 1})) > 0); });
  expect_mix_refused([&] { (void)(keys * on(sim(0), at::ones({4, 1}))); });
}

TEST(Guard, P30_TheOptimisersStateIsBesideItsVariable) {
  const auto run = [](c10::Device home, c10::Device gradients) {
    const at::Tensor variable = on(home, testing::random_matrix(4, 3, 1)).clone();
    editors::Adam adam({.lr = 0.1, .weight_decay = 0.01, .decoupled = true});
    for (uint64_t step = 0; step < 4; ++step)
      adam.step({variable}, {on(gradients, testing::random_matrix(4, 3, step))});
    EXPECT_EQ(variable.device(), home);
    return devices::to_host(variable);
  };
  const at::Tensor expected = run(kCpu, kCpu);
  for (const auto home : {kCpu, sim(0), sim(3)})
    for (const auto gradients : {kCpu, sim(0), sim(2)}) EXPECT_TRUE(at::equal(run(home, gradients), expected));
  const at::Tensor moment = on(sim(0), at::zeros({4, 3})), gradient = on(sim(1), at::ones({4, 3}));
  expect_mix_refused([&] { moment.lerp_(gradient, 0.1); });
  expect_mix_refused([&] { moment.addcdiv_(gradient, gradient, 0.1); });
}

}  // namespace guard_patterns_editing_test
}  // namespace emend
