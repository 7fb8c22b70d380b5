// UltraEdit on tiny models: the signals against the weight's gradient, the formula written out plainly, turns, memory.
#include <emend/core/error.h>
#include <emend/editors/packs/pack.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/learning_pass.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"

namespace emend {
namespace ultraedit_test {

using editors::EditContext;
using testing::all_weights;
using testing::changed_weights;
using testing::relative_difference;
using testing::tiny_facts;
using testing::tiny_model;

std::unique_ptr<editors::Editor> ultraedit(const models::Model& model, const std::string& hparams) {
  return editors::make_editor("ultraedit", hparams::parse_hparams(hparams, "test.yaml"), model);
}

std::vector<datasets::Fact> many_facts(int count) {
  std::vector<datasets::Fact> facts;
  for (int i = 0; i < count; ++i)
    facts.push_back(testing::make_fact(i, "{} is in", "Town" + std::to_string(i), i % 2 ? "Rome" : "Paris"));
  return facts;
}

TEST(LayerSignals, TheirProductIsTheWeightsGradient) {
  for (const char* family : {"llama", "gpt2"}) {
    models::Model model = tiny_model({.family = family, .dtype = at::kDouble});
    std::vector<editors::LearningRow> rows;
    for (const auto& fact : tiny_facts())
      rows.push_back(
          editors::learning_row(editors::render_prompts(model.tokenizer(), fact, editors::ContextTemplates::plain()),
                                editors::Objective::kTargetNew));
    const editors::LearningPass pass(model, rows, 1);
    const std::vector<double> weights = {0.4, 0.3, 0.2, 0.1};
    const auto signals = editors::layer_signals(model, pass, {1, 3}, weights);
    const editors::TrainableScope scope(
        {model.weight(model.edit_site(1).weight_name), model.weight(model.edit_site(3).weight_name)});
    const auto result = pass.run(weights, [&] { return scope.weights(); });
    for (size_t i = 0; i < 2; ++i) {
      at::Tensor gradient = signals[i].grad_ND.t().mm(signals[i].keys_NF);
      if (std::string(family) == "gpt2") gradient = gradient.t();
      EXPECT_LT(relative_difference(gradient, result.gradients[i]), 1e-12) << family << " " << i;
    }
  }
}

// The published steps in the plainest form, from the traced keys and from signals computed here.
TEST(UltraEdit, FollowsItsFormula) {
  models::Model model = tiny_model({.dtype = at::kDouble});
  const auto facts = tiny_facts();
  std::vector<editors::LearningRow> rows;
  double labels = 0;
  for (const auto& fact : facts) {
    const auto rendered = editors::render_prompts(model.tokenizer(), fact, editors::ContextTemplates::plain());
    rows.push_back(editors::learning_row(rendered, editors::Objective::kTargetNew));
    rows.back().ids.push_back(rendered.target_ids.back());
    labels += static_cast<double>(rendered.target_ids.size());
  }
  std::vector<double> weights;
  for (const auto& row : rows) weights.push_back(static_cast<double>(row.labels.size()) / labels);
  const auto signal = editors::layer_signals(model, editors::LearningPass(model, rows, 0), {2}, weights).at(0);
  const at::Tensor z = at::cat({signal.keys_NF, signal.grad_ND}, 1);
  const double n = static_cast<double>(z.size(0));
  const at::Tensor deviation = (z.var(0) * n / (n - 1)).sqrt() + std::numeric_limits<float>::epsilon();
  const at::Tensor hat = (z - z.mean(0)) / deviation;
  const at::Tensor value = hat.narrow(1, 0, 48).square().sum(1, true) * hat.narrow(1, 48, 32) * -1e-3;
  const at::Tensor& k = signal.keys_NF;
  const at::Tensor expected = at::inverse(k.t().mm(k) + at::eye(48, at::kDouble)).mm(k.t()).mm(value).t();

  EditContext context;
  editors::Trace trace;
  context.trace = &trace;
  const auto result = ultraedit(model, "layers: [2]\nlr: 1e-3\n")->edit(model, facts, context);
  EXPECT_LT(relative_difference(trace.at("layer.2.update"), expected), 1e-6);
  EXPECT_LT(relative_difference(result.deltas.at(0).matrix(), expected), 1e-6);
}

TEST(UltraEdit, TurnsKeepMemoryAndCanBeResumed) {
  const auto facts = many_facts(9);
  const char* hparams = "layers: [1, 2]\nlr: 1e-4\nbatch_size: 3\nbatch_size_once: 2\n";
  models::Model whole = tiny_model(), parts = tiny_model();
  EditContext one, two;
  const auto all = ultraedit(whole, hparams);
  const auto result = all->edit(whole, facts, one);
  EXPECT_EQ(result.deltas.size(), 2U) << "one a layer";
  // In three calls, the last by another instance with the memory of the first.
  const std::span<const datasets::Fact> span(facts);
  auto first = ultraedit(parts, hparams);
  (void)first->edit(parts, span.subspan(0, 3), two);
  (void)first->edit(parts, span.subspan(3, 3), two);
  auto second = ultraedit(parts, hparams);
  second->load_state(first->state());
  (void)second->edit(parts, span.subspan(6), two);
  EXPECT_TRUE(changed_weights(parts, all_weights(whole)).empty());
  EXPECT_EQ(second->state().size(), 3U) << "both layers have one shape";
  second->reset();
  EXPECT_TRUE(second->state().empty());
  // The pack gives the same bytes.
  models::Model fresh = tiny_model();
  editors::apply_pack(fresh, editors::EditPack::from_results(fresh, std::span(&result, 1), facts))->commit();
  EXPECT_TRUE(changed_weights(fresh, all_weights(whole)).empty());
}

TEST(UltraEdit, LowersTheLossAndLeavesNoTraceWhenCancelled) {
  models::Model model = tiny_model();
  const auto before = all_weights(model);
  const auto facts = many_facts(6);
  EditContext context;
  context.progress = [&](const ProgressUpdate& update) {
    if (update.done > 0) context.cancel.request();
  };
  const auto editor = ultraedit(model, "layers: [1, 2]\nlr: 1e-3\nbatch_size: 3\n");
  EXPECT_THROW((void)editor->edit(model, facts, context), Error);
  EXPECT_TRUE(changed_weights(model, before).empty());
  EXPECT_TRUE(editor->state().empty());
  EditContext fine;
  const auto first = editor->edit(model, facts, fine), second = editor->edit(model, facts, fine);
  double earlier = 0, later = 0;
  for (size_t i = 0; i < facts.size(); ++i) {
    earlier += first.outcomes[i].last.nll;
    later += second.outcomes[i].last.nll;
  }
  EXPECT_LT(later, earlier);
}

TEST(UltraEdit, NamesItsMatricesAsPublishedFilesDo) {
  models::Model model = tiny_model();
  for (const char* good : {"inner_params: [model.layers.1.mlp.down_proj, \"model.layers[2].mlp.down_proj.weight\"]\n",
                           "layers: [1, 2]\n"}) {
    EditContext context;
    const auto result = ultraedit(model, good)->edit(model, tiny_facts(), context);
    ASSERT_EQ(result.deltas.size(), 2U);
    EXPECT_EQ(result.deltas[0].layer, 1);
    EXPECT_EQ(result.deltas[1].layer, 2);
  }
  for (const char* bad :
       {"lr: 1e-6\n", "layers: [9]\n", "layers: [1]\ndropout: 0.1\n",
        "layers: [1]\ninner_params: [model.layers.1.mlp.down_proj]\n", "inner_params: [model.layers.1.mlp.up_proj]\n",
        "inner_params: [model.layers.1.mlp.nothing]\n"})
    EXPECT_THROW((void)ultraedit(model, bad), Error) << bad;
}

}  // namespace ultraedit_test
}  // namespace emend
