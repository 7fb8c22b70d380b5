#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/runtime.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/locate.h>
#include <emend/models/products.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/error_of.h"

namespace emend {
namespace memit_test {

using editors::EditContext;
using editors::EditResult;
using editors::Engine;
using hooks::Site;
using testing::all_weights;
using testing::changed_weights;
using testing::relative_difference;
using testing::tiny_facts;
using testing::tiny_model;

hparams::RawHparams hparams_of(const std::string& extra = "") {
  return hparams::parse_hparams(
      "layers: [1, 2]\nv_num_grad_steps: 6\nclamp_norm_factor: 0.75\nmom2_update_weight: 3\n" + extra, "test.yaml");
}

EditResult edit(models::Model& model, const std::vector<datasets::Fact>& facts, EditContext& context,
                const std::string& extra = "") {
  auto statistics = testing::tiny_statistics(model);
  if (!context.statistics) context.statistics = &statistics;
  if (!context.contexts) context.contexts = testing::tiny_contexts();
  const auto editor = editors::make_editor("memit", hparams_of(extra), model);
  EditResult result = editor->edit(model, facts, context);
  context.statistics = nullptr;
  return result;
}

TEST(Memit, WritesTheClosedFormLayerByLayer) {
  for (const char* family : {"llama", "gpt2"}) {
    models::Model model = tiny_model({.family = family});
    const auto statistics = testing::tiny_statistics(model);
    editors::Trace trace;
    EditContext context;
    context.trace = &trace;
    const auto before = all_weights(model);
    const int64_t flops = models::linear_flops();
    const EditResult result = edit(model, tiny_facts(), context);
    ASSERT_EQ(result.deltas.size(), 2U);
    EXPECT_GT(result.flops.at("targets"), result.flops.at("insert"));
    EXPECT_LE(result.flops.at("targets") + result.flops.at("insert"), models::linear_flops() - flops);
    for (const int layer : {1, 2}) {
      const std::string name = "layer." + std::to_string(layer) + ".";
      const at::Tensor keys = trace.at(name + "keys"), residual = trace.at(name + "resid");
      const at::Tensor system = 3 * statistics.get(layer).cov_FF() + keys.mm(keys.t());
      const at::Tensor expected = residual.mm(keys.t()).mm(at::linalg_inv(system));
      EXPECT_LT(relative_difference(trace.at(name + "update"), expected), 1e-10) << family;
      EXPECT_LT(relative_difference(trace.at(name + "weight_change"), expected), 1e-4) << family;
    }
    // The first layer gets half of the gap, the last one all that is left.
    EXPECT_LT(relative_difference(trace.at("layer.1.resid") * 2, trace.at("layer.1.targets")), 1e-12);
    EXPECT_TRUE(at::equal(trace.at("layer.2.resid"), trace.at("layer.2.targets")));
    EXPECT_EQ(changed_weights(model, before),
              (std::vector<std::string>{model.edit_site(1).weight_name, model.edit_site(2).weight_name}));
  }
}

TEST(Memit, MovesTheHiddenStateTowardsTheTarget) {
  models::Model model = tiny_model();
  editors::Trace trace;
  EditContext context;
  context.trace = &trace;
  const auto facts = std::vector<datasets::Fact>{tiny_facts()[0], tiny_facts()[1]};
  (void)edit(model, facts, context);
  EXPECT_LT(trace.at("layer.2.targets").norm().item<double>(), trace.at("layer.1.targets").norm().item<double>())
      << "the first layer helped";
}

// Factors of 16 facts have (32 + 48)·16 entries, the matrix 32·48.
TEST(Memit, AnUpdateIsKeptInTheSmallerForm) {
  for (const size_t n : {4, 20}) {
    models::Model model = tiny_model();
    std::vector<datasets::Fact> facts;
    for (size_t i = 0; i < n; ++i) {
      facts.push_back(tiny_facts()[i % 4]);
      facts.back().case_id = static_cast<int64_t>(i);
      facts.back().subject += std::string(i / 4, 'x');
    }
    editors::Trace trace;
    EditContext context;
    context.trace = &trace;
    const EditResult result = edit(model, facts, context);
    ASSERT_EQ(result.deltas.size(), 2U);
    for (const auto& delta : result.deltas) {
      EXPECT_EQ(delta.low_rank(), n == 4);
      const std::string name = "layer." + std::to_string(delta.layer) + ".";
      EXPECT_LT(relative_difference(trace.at(name + "resid").mm(trace.at(name + "adj_k").t()), delta.matrix()), 1e-12);
    }
  }
}

// Keys and statistics too, and only as long as the edit takes.
TEST(Memit, Tf32CoversTheWholeEdit) {
  models::Model model = tiny_model();
  EditContext context;
  context.tf32 = true;
  std::map<std::string, bool> seen;
  context.progress = [&](const ProgressUpdate& update) { seen[update.phase] = devices::tf32_products(); };
  (void)edit(model, tiny_facts(), context);
  EXPECT_FALSE(devices::tf32_products());
  EXPECT_EQ(seen, (std::map<std::string, bool>{{"insert", true}, {"targets", true}}));
}

TEST(Memit, EnginesWriteTheSameWeights) {
  for (const char* family : {"llama", "gpt2"}) {
    models::Model fast = tiny_model({.family = family, .dtype = at::kDouble}),
                  reference = tiny_model({.family = family, .dtype = at::kDouble});
    EditContext fast_context, reference_context;
    reference_context.engine = Engine::kReference;
    (void)edit(fast, tiny_facts(), fast_context);
    (void)edit(reference, tiny_facts(), reference_context);
    for (const int layer : {1, 2}) {
      const auto name = fast.edit_site(layer).weight_name;
      EXPECT_LT(relative_difference(fast.weight(name), reference.weight(name)), 1e-9) << family;
    }
  }
}

TEST(Memit, SameSeedSameBytes) {
  models::Model first = tiny_model(), second = tiny_model(), other = tiny_model();
  const auto run = [](models::Model& model, uint64_t seed) {
    auto statistics = testing::tiny_statistics(model);
    EditContext context;
    context.seed = seed;
    context.statistics = &statistics;
    const auto editor = editors::make_editor("memit", hparams_of(), model);
    const auto facts = tiny_facts();
    const EditResult result = editor->edit(model, facts, context);
    EXPECT_TRUE(result.contexts && result.contexts->sampled);
    EXPECT_FALSE(context.contexts) << "what was given is not written to";
    EXPECT_EQ(editor->edit(model, facts, context).contexts->groups, result.contexts->groups)
        << "the editor keeps them for later batches";
    EXPECT_EQ(result.to_json()["contexts"]["seed"], seed);
  };
  run(first, 5);
  run(second, 5);
  run(other, 6);
  EXPECT_TRUE(changed_weights(first, all_weights(second)).empty());
  EXPECT_FALSE(changed_weights(first, all_weights(other)).empty());
}

TEST(Memit, LeavesNoTraceWhenItFails) {
  models::Model model = tiny_model();
  const auto before = all_weights(model);
  // Cancelled between two layers, when the first is written already.
  EditContext cancelled;
  cancelled.progress = [&](const ProgressUpdate& update) {
    if (update.phase == "insert" && update.done == 1) cancelled.cancel.request();
  };
  (void)testing::error_of([&] { (void)edit(model, tiny_facts(), cancelled); }, ErrorClass::kCancelled);
  EXPECT_TRUE(changed_weights(model, before).empty());
  // An exception of somebody else's.
  EditContext thrown;
  thrown.progress = [](const ProgressUpdate& update) {
    if (update.phase == "insert" && update.done == 1) throw std::runtime_error("full disk");
  };
  EXPECT_THROW((void)edit(model, tiny_facts(), thrown), std::runtime_error);
  EXPECT_TRUE(changed_weights(model, before).empty());
  // A system that cannot be solved in the second layer.
  editors::FixedStatistics broken(
      {{1, editors::SecondMoment(testing::random_spd(48, 1))},
       {2, editors::SecondMoment(testing::random_spd(48, 1) - 50 * at::eye(48, at::kDouble))}});
  EditContext unsolvable;
  unsolvable.statistics = &broken;
  (void)testing::error_of([&] { (void)edit(model, tiny_facts(), unsolvable); }, ErrorClass::kNumeric);
  EXPECT_TRUE(changed_weights(model, before).empty());
  EditContext fine;
  (void)edit(model, tiny_facts(), fine);
  EXPECT_EQ(changed_weights(model, before).size(), 2U);
}

TEST(Memit, CallersCanUndoSeveralEdits) {
  models::Model model = tiny_model();
  const auto before = all_weights(model);
  {
    editors::EditTransaction all(model);
    EditContext context;
    context.transaction = &all;
    const auto facts = tiny_facts();
    (void)edit(model, {facts[0]}, context);
    (void)edit(model, {facts[1]}, context);
    EXPECT_EQ(all.changed().size(), 2U);
  }
  EXPECT_TRUE(changed_weights(model, before).empty());
}

TEST(Memit, ABadFactFailsAloneAndOutcomesKeepTheirOrder) {
  models::Model model = tiny_model();
  auto facts = tiny_facts();
  facts[1].prompt = "no place for a subject";
  EditContext context;
  const EditResult result = edit(model, facts, context);
  ASSERT_EQ(result.outcomes.size(), 4U);
  EXPECT_EQ(result.outcomes[1].status, editors::FactStatus::kFailed);
  EXPECT_NE(result.outcomes[1].reason.find("{}"), std::string::npos) << result.outcomes[1].reason;
  EXPECT_EQ(result.failed(), 1);
  EXPECT_EQ(result.deltas[0].rank(), 3);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(result.outcomes[i].case_id, facts[i].case_id);
  // Tokens with the subject and the target marked.
  const auto& outcome = result.outcomes[0];
  std::string text;
  for (int64_t t = outcome.subject_span.first; t < outcome.subject_span.second; ++t)
    text += outcome.tokens[static_cast<size_t>(t)];
  EXPECT_EQ(text, "Oslo");
  text.clear();
  for (int64_t t = outcome.target_span.first; t < outcome.target_span.second; ++t)
    text += outcome.tokens[static_cast<size_t>(t)];
  EXPECT_EQ(text, " Rome");
  EXPECT_EQ(outcome.curve.size(), 6U);
  // Nothing but bad facts: nothing is written, and that is said of each.
  const auto before = all_weights(model);
  EditContext none;
  const EditResult empty = edit(model, {facts[1]}, none);
  EXPECT_EQ(empty.failed(), 1);
  EXPECT_TRUE(changed_weights(model, before).empty());
  EditContext no_facts;
  EXPECT_TRUE(edit(model, {}, no_facts).deltas.empty());
}

TEST(Memit, EqualKeysCanShareOneTarget) {
  models::Model model = tiny_model();
  editors::Trace trace;
  EditContext context;
  context.trace = &trace;
  const EditResult result = edit(model, tiny_facts(), context, "merge_equal_keys: true\n");
  EXPECT_TRUE(at::equal(trace.at("z.3.target"), trace.at("z.9.target"))) << "the two facts about Oslo";
  EXPECT_FALSE(at::equal(trace.at("z.3.target"), trace.at("z.7.target")));
  EXPECT_EQ(trace.at("z.3.labels").size(0), 6) << "with the rows of both";
  EXPECT_EQ(result.outcomes[0].case_id, 3);
  EXPECT_EQ(result.outcomes[3].case_id, 9);
  EXPECT_EQ(result.outcomes[1].curve.size(), 6U);
  EXPECT_EQ(result.outcomes[0].curve.size(), 8U) << "√2 times the steps for two facts";
  EXPECT_EQ(result.outcomes[3].curve.size(), 8U);
}

TEST(Memit, FurtherRoundsEditOnlyWhatHasNotTaken) {
  const auto facts = tiny_facts();
  const auto run = [&](const std::string& more, models::Model& model) {
    EditContext context;
    return edit(model, facts, context, more);
  };
  const auto mean_nll = [](const EditResult& result) {
    double sum = 0;
    for (const auto& outcome : result.outcomes) sum += outcome.last.nll;
    return sum / static_cast<double>(result.outcomes.size());
  };
  models::Model once = tiny_model(), never_again = tiny_model(), thrice = tiny_model();
  const EditResult one = run("", once);
  (void)run("rounds: 3\nround_probability: 0\n", never_again);
  EXPECT_TRUE(changed_weights(never_again, all_weights(once)).empty()) << "every fact has a probability above 0";

  const EditResult three = run("rounds: 3\nround_probability: 1\n", thrice);
  EXPECT_EQ(three.deltas.size(), 3 * one.deltas.size());
  for (size_t i = 0; i < facts.size(); ++i) {
    EXPECT_EQ(three.outcomes[i].case_id, facts[i].case_id);
    EXPECT_EQ(three.outcomes[i].curve.size(), 18U);
    EXPECT_EQ(three.outcomes[i].steps, 15);
  }
  EXPECT_LT(mean_nll(three), mean_nll(one));

  // A limit between the facts: some are written again.
  const auto with_limit = [&](double limit) {
    models::Model model = tiny_model();
    return run("rounds: 2\nround_probability: " + std::to_string(limit) + "\n", model);
  };
  bool between = false;
  for (double limit = 1; limit > 1e-6 && !between; limit /= 2) {
    const EditResult result = with_limit(limit);
    int64_t again = 0;
    for (const auto& outcome : result.outcomes) again += outcome.curve.size() == 12;
    between = again > 0 && again < 4;
    if (between) {
      EXPECT_EQ(result.deltas.back().rank(), again);
    }
  }
  EXPECT_TRUE(between);
}

TEST(Memit, RoundsAreRefusedWhereABatchIsWrittenOnce) {
  models::Model model = tiny_model();
  for (const char* name : {"rect", "anyedit", "sphere"})
    testing::expect_refused([&] { (void)testing::tiny_editor(name, "layers: [1, 2]\nrounds: 2\n", model); },
                            ErrorClass::kInvalidArgument, {"writes a batch only once"});
}

TEST(Memit, HyperParametersMustFitTheModel) {
  const models::Model model = tiny_model();
  const auto refused = [&](const std::string& text, const std::string& part) {
    testing::expect_refused([&] { (void)testing::tiny_editor("memit", text, model); }, ErrorClass::kInvalidArgument,
                            {part, "test.yaml"});
  };
  refused("layers: [3, 4]\n", "layer 4");
  refused("layers: [1]\nv_loss_layer: 31\n", "v_loss_layer");
  refused("layers: [1]\nrewrite_module_tmp: transformer.h.{}.mlp.c_proj\n", "rewrite_module_tmp");
  refused("layers: [1]\nv_lrr: 3\n", "v_lr");
  refused("layers: [1]\nnas_norm: 3\n", "nas_norm");
}

TEST(Memit, NeedsStatistics) {
  models::Model model = tiny_model();
  const auto editor = editors::make_editor("memit", hparams_of(), model);
  EXPECT_EQ(editor->statistics_layers(), (std::vector<int>{1, 2}));
  EditContext context;
  context.contexts = testing::tiny_contexts();
  const auto facts = tiny_facts();
  EXPECT_THROW((void)editor->edit(model, facts, context), Error);
}

}  // namespace memit_test
}  // namespace emend
