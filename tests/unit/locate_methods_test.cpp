// EMMET, PMET, ENCORE and AnyEdit: the step in which each differs from MEMIT.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/locate.h>
#include <emend/editors/steps/modifiers.h>
#include <emend/editors/steps/targets.h>
#include <gtest/gtest.h>

#include "support/error_of.h"
#include "support/sequential_editors.h"

namespace emend {
namespace locate_methods_test {

using editors::EditContext;
using editors::EditResult;
using testing::made_up;
using testing::random_matrix;
using testing::relative_difference;
using testing::solved;
using testing::tiny_facts;
using testing::tiny_model;

std::unique_ptr<editors::Editor> make(const std::string& name, const std::string& more, const models::Model& model) {
  const std::string steps = more.find("v_num_grad_steps") == std::string::npos ? "v_num_grad_steps: 6\n" : "";
  return testing::tiny_editor(name, "layers: [1, 2]\n" + steps + more, model);
}

EditResult edit(editors::Editor& editor, models::Model& model, const std::vector<datasets::Fact>& facts,
                EditContext& context) {
  auto statistics = testing::tiny_statistics(model);
  context.statistics = &statistics;
  if (!context.contexts) context.contexts = testing::tiny_contexts();
  EditResult result = editor.edit(model, facts, context);
  context.statistics = nullptr;
  return result;
}

void expect_refused(const models::Model& model, const std::string& editor, const std::string& more,
                    const std::string& part, ErrorClass error_class = ErrorClass::kInvalidArgument) {
  testing::expect_refused([&] { (void)make(editor, more, model); }, error_class, {part, "test.yaml"});
}

TEST(Emmet, MeetsEveryFactExactlyAndDisturbsTheRestLeast) {
  const models::Model model = tiny_model();
  const auto problem = made_up(model, 1, 5);
  const at::Tensor delta = solved(*make("emmet", "emmet_lambda: 0\n", model), problem);
  EXPECT_LT(relative_difference(delta.mm(problem.keys_FN), problem.residual_DN), 1e-10);
  // Any other solution moves the preserved keys more: add a change that leaves all keys alone.
  const at::Tensor q = std::get<0>(at::linalg_qr(problem.keys_FN));
  const at::Tensor noise = random_matrix(32, 48, 9);
  const at::Tensor other = delta + 0.1 * (noise - noise.mm(q).mm(q.t()));
  EXPECT_LT(relative_difference(other.mm(problem.keys_FN), problem.residual_DN), 1e-10);
  const auto disturbance = [&](const at::Tensor& d) {
    return d.mm(problem.moment.cov_FF()).mul(d).sum().item<double>();
  };
  EXPECT_LT(disturbance(delta), disturbance(other));
}

TEST(Emmet, IsTheFormulaWithBothWeights) {
  const models::Model model = tiny_model();
  const auto problem = made_up(model, 1, 5);
  const at::Tensor got =
      solved(*make("emmet", "mom2_update_weight: 3\nupdate_norm_lambda: 0.5\nemmet_lambda: 0.2\n", model), problem);
  const at::Tensor c = 3 * problem.moment.cov_FF() + 0.5 * at::eye(48, at::kDouble), k = problem.keys_FN;
  const at::Tensor ck = at::linalg_inv(c).mm(k);
  const at::Tensor d = k.t().mm(ck) + 0.2 * at::eye(5, at::kDouble);
  EXPECT_LT(relative_difference(got, problem.residual_DN.mm(at::linalg_inv(d)).mm(ck.t())), 1e-10);
  // Without statistics C is the identity.
  auto bare = problem;
  bare.moment = {};
  const at::Tensor identity = solved(*make("emmet", "mom2_adjustment: false\nemmet_lambda: 0\n", model), bare);
  EXPECT_LT(relative_difference(identity, problem.residual_DN.mm(at::linalg_pinv(k))), 1e-8);
}

TEST(Emmet, EqualKeysGetTheMeanOfTheirTargets) {
  const models::Model model = tiny_model();
  auto problem = made_up(model, 1, 3);
  problem.keys_FN.select(1, 2).copy_(problem.keys_FN.select(1, 1));
  for (const auto& [dtype, close] : {std::pair(at::kDouble, 1e-8), std::pair(at::kFloat, 1e-3)}) {
    problem.dtype = dtype;
    problem.keys_FN = problem.keys_FN.to(dtype);
    problem.residual_DN = problem.residual_DN.to(dtype);
    const at::Tensor moved = solved(*make("emmet", "emmet_lambda: 0\n", model), problem).to(dtype).mm(problem.keys_FN);
    EXPECT_LT(relative_difference(moved.select(1, 0), problem.residual_DN.select(1, 0)), close);
    EXPECT_LT(relative_difference(moved.select(1, 1), problem.residual_DN.narrow(1, 1, 2).mean(1)), close);
  }
}

TEST(Pmet, OptimisesTwoPlacesAndWritesOne) {
  models::Model model = tiny_model();
  const auto before = testing::all_weights(model);
  editors::Trace trace;
  EditContext context;
  context.trace = &trace;
  const auto editor = make("pmet", "rewrite_module_tmps: [\"model.layers.{}.mlp.down_proj\"]\n", model);
  const auto result = edit(*editor, model, tiny_facts(), context);
  EXPECT_EQ(result.failed(), 0);
  for (const char* name : {"z.3.delta_steps_mlp", "z.3.delta_steps_attn"})
    EXPECT_GT(trace.at(name)[-1].norm().item<double>(), 0) << name;
  EXPECT_EQ(testing::changed_weights(model, before).size(), 2U) << "the MLP's matrices of two layers";
  // sqrt(2) in the first of two layers, all in the last.
  EXPECT_LT(relative_difference(trace.at("layer.1.resid") * std::sqrt(2.0), trace.at("layer.1.targets")), 1e-12);
  EXPECT_TRUE(at::equal(trace.at("layer.2.resid"), trace.at("layer.2.targets")));
}

TEST(Pmet, OtherMatricesAreRefused) {
  const models::Model model = tiny_model();
  expect_refused(model, "pmet",
                 "rewrite_module_tmps: [\"model.layers.{}.mlp.down_proj\", \"model.layers.{}.self_attn.o_proj\"]\n",
                 "2 matrices", ErrorClass::kUnsupported);
  expect_refused(model, "pmet", "rewrite_module_tmps: [\"model.layers.{}.self_attn.o_proj\"]\n", "o_proj");
}

// Facts that share a target have the same states in the same contexts: the penalty is that of one of them.
TEST(Core, ASharedTargetHasThePenaltyOfOneFact) {
  auto facts = std::vector<datasets::Fact>(3, tiny_facts().front());
  for (size_t i = 0; i < facts.size(); ++i) {
    facts[i].case_id = static_cast<int64_t>(i);
    facts[i].prompt += std::vector<std::string>{"", " in", " with the"}[i];
  }
  for (const auto engine : {editors::Engine::kFast, editors::Engine::kReference}) {
    std::vector<double> penalties;
    for (const char* merged : {"false", "true"}) {
      models::Model model = tiny_model();
      EditContext context;
      context.engine = engine;
      const auto editor = make("core",
                               "v_num_grad_steps: 1\nv_loss_layer: 3\nlayer_range: 2\nreg_lambda: 1\n"
                               "v_weight_decay: 0\nkl_factor: 0\nmerge_equal_keys: " +
                                   std::string(merged) + "\n",
                               model);
      const auto result = edit(*editor, model, facts, context);
      for (const auto& outcome : result.outcomes) penalties.push_back(outcome.curve.at(0).weight_decay);
    }
    EXPECT_GT(penalties[0], 0);
    for (const double penalty : penalties) EXPECT_NEAR(penalty, penalties[0], 1e-4 * penalties[0]);
  }
}

TEST(Core, APenaltyThatComparesNothingIsRefused) {
  const models::Model model = tiny_model();
  for (const char* settings : {"reg_lambda: 1\n", "reg_lambda: 1\nlayer_range: 2\nv_loss_layer: 2\n"})
    EXPECT_THROW((void)make("core", settings, model), Error) << settings;
  EXPECT_NO_THROW((void)make("core", "layer_range: 2\n", model));
}

// What is written counts, not what was solved for.
TEST(Modifiers, HoldOnWhatAnEditorMakesOfItsSolution) {
  for (const std::string name : {"memit", "rect", "sphere"}) {
    const std::string more = name == "sphere" ? "nullspace_threshold: 1\n" : "";
    models::Model model = tiny_model();
    std::map<std::string, at::Tensor> before;
    for (const auto& weight : model.weight_names()) before[weight] = model.weight(weight).clone();
    EditContext context;
    const auto result = edit(*make(name, "revive: 0.5\n" + more, model), model, tiny_facts(), context);
    ASSERT_FALSE(result.deltas.empty());
    for (const auto& delta : result.deltas) {
      const auto [left_DK, right_FK] = editors::leading_directions(before.at(delta.weight).to(at::kDouble), 0.5);
      const at::Tensor change = delta.matrix().to(at::kDouble);
      EXPECT_LT(left_DK.t().mm(change).norm().item<double>(), 1e-5 * change.norm().item<double>()) << name;
      EXPECT_LT(change.mm(right_FK).norm().item<double>(), 1e-5 * change.norm().item<double>()) << name;
    }
  }
}

TEST(Encore, HoldsTheNormBackAndRemembersEarlierBatches) {
  models::Model model = tiny_model();
  const auto problem = made_up(model, 1, 4);
  const auto loose = make("encore", "mom2_update_weight: 2\nupdate_norm_lambda: 0\n", model),
             tight = make("encore", "mom2_update_weight: 2\nupdate_norm_lambda: 5\n", model);
  const at::Tensor k = problem.keys_FN, c = 2 * problem.moment.cov_FF();
  EXPECT_LT(relative_difference(solved(*tight, problem), problem.residual_DN.mm(k.t()).mm(at::linalg_inv(
                                                             c + 5 * at::eye(48, at::kDouble) + k.mm(k.t())))),
            1e-10);
  EXPECT_LT(solved(*tight, problem).norm().item<double>(), solved(*loose, problem).norm().item<double>());
  EditContext context;
  (void)edit(*loose, model, tiny_facts(), context);
  EXPECT_EQ(loose->state().size(), 2U) << "keys of two layers";
  const auto forgetful = make("encore", "add_prev_edits: false\n", model);
  (void)edit(*forgetful, model, tiny_facts(), context);
  EXPECT_TRUE(forgetful->state().empty());
}

// The other form, by argmax, is targets_test's.
TEST(Encore, StopsAtTheProbabilityAskedFor) {
  const auto outcome = [&](const datasets::Fact& fact, const std::string& more) {
    models::Model model = tiny_model();
    EditContext context;
    const auto editor = make("encore",
                             "v_num_grad_steps: 12\nclamp_norm_factor: 50\nv_stop_loss: 0\nv_weight_decay: 0\n"
                             "kl_factor: 0\n" +
                                 more,
                             model);
    return edit(*editor, model, {fact}, context).outcomes.at(0);
  };
  // The first step whose mean probability exceeds it is the last.
  const auto wanted = testing::make_fact(1, "{} is in", "Oslo", "Rome");
  const auto all = outcome(wanted, "prob_cutoff: 0\n");
  ASSERT_EQ(all.curve.size(), 12U);
  const double cutoff = (all.curve[0].probability + all.curve[11].probability) / 2;
  size_t first = 0;
  while (all.curve[first].probability <= cutoff) ++first;
  EXPECT_GT(first, 0U);
  const auto stopped = outcome(wanted, "prob_cutoff: " + std::to_string(cutoff) + "\n");
  EXPECT_EQ(stopped.steps, static_cast<int64_t>(first));
  EXPECT_EQ(stopped.status, editors::FactStatus::kConverged);
}

TEST(Encore, TrialsOfTheReferenceThatAreOffCannotBeSwitchedOn) {
  const models::Model model = tiny_model();
  expect_refused(model, "encore", "use_gd: true\n", "not carried");
  expect_refused(model, "encore", "norm_control: 1\n", "not carried");
  expect_refused(model, "encore", "random_vector_preservation: true\n", "not carried");
  expect_refused(model, "encore", "prob_cutoff: -1.5\n", "whole number");
}

TEST(Windows, CoverTheTarget) {
  using Cut = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(editors::cut_target(7, {0, 0}), (Cut{{0, 7}}));
  EXPECT_EQ(editors::cut_target(7, {3, 0}), (Cut{{0, 3}, {3, 6}, {6, 7}}));
  EXPECT_EQ(editors::cut_target(6, {3, 0}), (Cut{{0, 3}, {3, 6}}));
  EXPECT_EQ(editors::cut_target(7, {3, 1}), (Cut{{0, 3}, {2, 5}, {4, 7}}));
  EXPECT_EQ(editors::cut_target(3, {8, 2}), (Cut{{0, 3}}));
}

const datasets::Fact kLong = testing::make_fact(5, "The song of {} goes", "Ada", "la la lu la di da");

TEST(AnyEdit, ShortTargetsAreEditedAsMemitDoes) {
  models::Model memit = tiny_model(), windows = tiny_model();
  EditContext a, b;
  const auto first = make("memit", "mom2_update_weight: 3\n", memit),
             second = make("anyedit", "mom2_update_weight: 3\nwindow_size: 10\n", windows);
  (void)edit(*first, memit, tiny_facts(), a);
  (void)edit(*second, windows, tiny_facts(), b);
  EXPECT_TRUE(testing::changed_weights(windows, testing::all_weights(memit)).empty());
}

TEST(AnyEdit, EveryWindowIsAColumnWithItsOwnKey) {
  for (const auto engine : {editors::Engine::kFast, editors::Engine::kReference}) {
    models::Model model = tiny_model({.dtype = at::kDouble});
    editors::Trace trace;
    EditContext context;
    context.engine = engine;
    context.trace = &trace;
    const auto editor = make("anyedit", "mom2_update_weight: 3\nwindow_size: 8\n", model);
    const EditResult result = edit(*editor, model, {tiny_facts()[0], kLong}, context);
    const auto target = trace.at("z.5.target_ids").size(0);
    EXPECT_EQ(target, 8);
    // " la la lu la di da" has 18 bytes: windows of 8, 8 and 2.
    EXPECT_EQ(trace.at("z.5.window.1.target_ids").size(0), 8);
    EXPECT_EQ(trace.at("z.5.window.2.target_ids").size(0), 2);
    EXPECT_FALSE(trace.contains("z.5.window.3.target_ids"));
    EXPECT_EQ(trace.at("layer.1.keys").size(1), 4) << "one fact with one window, one with three";
    // A later window is looked up at the token before it.
    const at::Tensor lookup = trace.at("z.5.window.1.lookup"), labels = trace.at("z.5.window.1.labels");
    EXPECT_EQ(lookup.size(0), labels.size(0)) << "no divergence rows";
    for (int64_t row = 0; row < lookup.size(0); ++row)
      EXPECT_GE(labels[row][lookup[row].item<int64_t>()].item<int64_t>(), 0) << "it predicts the window's first token";
    ASSERT_EQ(result.outcomes.size(), 2U);
    EXPECT_EQ(result.outcomes[1].steps, 15) << "three windows of five updates";
    EXPECT_EQ(result.outcomes[1].curve.size(), 18U);
    const auto span = result.outcomes[1].target_span;
    EXPECT_EQ(span.second - span.first, 18);
  }
}

TEST(AnyEdit, EarlierWindowsStayWhileLaterOnesMove) {
  models::Model model = tiny_model({.dtype = at::kDouble});
  const auto rendered = editors::render_prompts(model.tokenizer(), kLong, testing::tiny_contexts());
  const auto first = editors::window_of(rendered, {0, 8}), second = editors::window_of(rendered, {8, 16});
  EXPECT_EQ(first.kl_rows.size(), 1U);
  EXPECT_TRUE(second.kl_rows.empty());
  EXPECT_EQ(second.rows[0].ids.size(), rendered.rows[0].ids.size() + 8);
  EXPECT_EQ(second.rows[0].lookup, static_cast<int64_t>(second.rows[0].ids.size()) - 1);
  editors::Target target;
  target.delta_D = {random_matrix(1, 32, 3)[0]};
  auto problem = editors::make_target_problem(second);
  editors::hold(problem, first, target);
  ASSERT_EQ(problem.held.size(), problem.rows.size());
  for (size_t row = 0; row < problem.rows.size(); ++row) {
    EXPECT_EQ(problem.held[row].row, row);
    EXPECT_EQ(problem.held[row].token, rendered.rows[row].lookup);
  }
}

TEST(AnyEdit, WhatCannotBeCutIsRefused) {
  const models::Model model = tiny_model();
  expect_refused(model, "anyedit", "window_size: 4\noverlap: 4\n", "less than window_size");
  expect_refused(model, "anyedit", "merge_equal_keys: true\n", "target of its own");
  expect_refused(model, "anyedit", "window_size: 0\n", "window_size");
}

}  // namespace locate_methods_test
}  // namespace emend
