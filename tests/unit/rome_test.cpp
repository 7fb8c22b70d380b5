#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/locate.h>
#include <emend/editors/steps/rank_one.h>
#include <gtest/gtest.h>

#include "support/collected_events.h"
#include "support/error_of.h"
#include "support/sequential_editors.h"

namespace emend {
namespace rome_test {

using editors::EditContext;
using editors::EditResult;
using editors::Engine;
using testing::all_weights;
using testing::changed_weights;
using testing::relative_difference;
using testing::tiny_facts;
using testing::tiny_model;

EditResult edit(models::Model& model, const std::vector<datasets::Fact>& facts, EditContext& context,
                const std::string& extra = "layers: [1]\n", const std::string& name = "rome") {
  auto statistics = testing::tiny_statistics(model);
  context.statistics = &statistics;
  if (!context.contexts) context.contexts = editors::ContextTemplates{{testing::tiny_contexts().flat()}, false, 0};
  EXPECT_FALSE(editors::find_editor(name).batch) << name;
  const auto editor = testing::tiny_editor(name, extra + "v_num_grad_steps: 6\n", model);
  EditResult result = editor->edit(model, facts, context);
  context.statistics = nullptr;
  return result;
}

at::Tensor paper(const models::Model& model, int layer) {
  const auto site = model.edit_site(layer);
  const at::Tensor weight = model.weight(site.weight_name).detach().clone();
  return site.orientation == models::Orientation::kInOut ? weight.t() : weight;
}

TEST(Rome, ThePlainKeyGivesExactlyTheWantedValue) {
  for (const char* family : {"llama", "gpt2"}) {
    models::Model model = tiny_model({.family = family});
    editors::Trace trace;
    EditContext context;
    context.trace = &trace;
    const at::Tensor before = paper(model, 1);
    const EditResult result = edit(model, {tiny_facts()[0]}, context);
    ASSERT_EQ(result.deltas.size(), 1U);
    EXPECT_EQ(result.deltas[0].rank(), 1);
    const at::Tensor key = trace.at("case.3.cur_input")[0].to(at::kDouble),
                     value = trace.at("case.3.cur_output")[0].to(at::kDouble);
    const at::Tensor moved = value + (paper(model, 1) - before).to(at::kDouble).mv(key);
    EXPECT_LT(relative_difference(moved, trace.at("case.3.v_target")), 1e-4) << family;
    // u = C⁻¹k̄, of length 1.
    const at::Tensor mean = trace.at("case.3.keys_per_context").to(at::kDouble).mean(0);
    const at::Tensor u =
        at::linalg_solve(testing::tiny_statistics(model).get(1).cov_FF(), mean.unsqueeze(1)).squeeze(1);
    EXPECT_LT(relative_difference(trace.at("case.3.u"), u / u.norm()), 1e-6) << family;  // the mean is taken in float32
  }
}

TEST(Rome, WithoutTheSecondMomentTheDirectionIsTheKey) {
  models::Model model = tiny_model();
  editors::Trace trace;
  EditContext context;
  context.trace = &trace;
  (void)edit(model, {tiny_facts()[0]}, context, "layers: [1]\nmom2_adjustment: false\n");
  const at::Tensor mean = trace.at("case.3.keys_per_context").to(at::kDouble).mean(0);
  EXPECT_LT(relative_difference(trace.at("case.3.u"), mean / mean.norm()), 1e-6);
  const auto editor = testing::tiny_editor("rome", "layers: [1]\nmom2_adjustment: false\n", model);
  EXPECT_TRUE(editor->statistics_layers().empty());
}

// The caller's progress is not reported to while a fact's target is optimised; an error there must not take it away.
TEST(Rome, AnErrorWhileATargetIsOptimisedLeavesTheContextAsItWas) {
  models::Model model = tiny_model();
  const auto before = all_weights(model);
  int calls = 0;
  EditContext context;
  context.progress = [&](const ProgressUpdate&) { ++calls; };
  {
    const auto broken = model.hooks().at({hooks::Site::kLayerOut, 3}).add([](const at::Tensor&) {
      if (at::GradMode::is_enabled()) throw std::runtime_error("a hook of somebody else's");
      return at::Tensor();
    });
    EXPECT_THROW((void)edit(model, {tiny_facts()[0]}, context), std::runtime_error);
  }
  EXPECT_TRUE(changed_weights(model, before).empty());
  EXPECT_EQ(calls, 1);
  (void)edit(model, {tiny_facts()[0]}, context);
  EXPECT_EQ(calls, 3) << "the next edit reports again";
}

TEST(Rome, FactsFollowEachOtherOnTheEditedModel) {
  models::Model together = tiny_model(), one_by_one = tiny_model();
  const auto facts = tiny_facts();
  EditContext context;
  const EditResult result = edit(together, facts, context);
  EXPECT_EQ(result.deltas.size(), 4U);
  for (const auto& fact : facts) {
    EditContext each;
    (void)edit(one_by_one, {fact}, each);
  }
  EXPECT_TRUE(changed_weights(together, all_weights(one_by_one)).empty());
}

TEST(Rome, SeveralLayersOneAfterTheOther) {
  models::Model model = tiny_model();
  const auto before = all_weights(model);
  EditContext context;
  const EditResult result = edit(model, {tiny_facts()[0]}, context, "layers: [1, 2]\n");
  EXPECT_EQ(result.deltas.size(), 2U);
  EXPECT_EQ(changed_weights(model, before).size(), 2U);
}

TEST(Rome, EnginesWriteTheSameWeights) {
  models::Model fast = tiny_model({.dtype = at::kDouble}), reference = tiny_model({.dtype = at::kDouble});
  EditContext fast_context, reference_context;
  reference_context.engine = Engine::kReference;
  (void)edit(fast, tiny_facts(), fast_context);
  (void)edit(reference, tiny_facts(), reference_context);
  EXPECT_LT(relative_difference(paper(fast, 1), paper(reference, 1)), 1e-7);
}

TEST(Rome, LeavesNoTraceWhenItFails) {
  models::Model model = tiny_model();
  const auto before = all_weights(model);
  EditContext context;
  int facts_begun = 0;
  context.progress = [&](const ProgressUpdate& update) {
    if (update.phase == "edit" && ++facts_begun == 3) context.cancel.request();
  };
  EXPECT_THROW((void)edit(model, tiny_facts(), context), Error);
  EXPECT_EQ(facts_begun, 3) << "two facts were written before";
  EXPECT_TRUE(changed_weights(model, before).empty());
  auto facts = tiny_facts();
  facts[2].prompt = "no place";
  EditContext fine;
  const EditResult result = edit(model, facts, fine);
  EXPECT_EQ(result.outcomes[2].status, editors::FactStatus::kFailed);
  EXPECT_EQ(result.deltas.size(), 3U);
}

// ROME reads the model's own logits: what a file says of another layer is not passed over in silence.
TEST(Rome, SaysThatALossLayerBelowTheLastDoesNothing) {
  const models::Model model = tiny_model();
  for (const char* name : {"rome", "r-rome"})
    for (const auto& [text, warnings] : {std::pair("layers: [1]\n", 0), std::pair("layers: [1]\nv_loss_layer: 3\n", 0),
                                         std::pair("layers: [1]\nv_loss_layer: 2\n", 1)}) {
      const auto told = std::make_shared<testing::CollectedEvents>();
      (void)editors::make_editor(name, hparams::parse_hparams(text, "test.yaml"), model, Log({told}));
      EXPECT_EQ(told->count("hparams.ignored"), warnings) << name << ": " << text;
    }
  // Bundled presets keep the published layer, without a word.
  const auto told = std::make_shared<testing::CollectedEvents>();
  const auto own = hparams::parse_hparams("layers: [1]\nv_loss_layer: 2\n", "test.yaml");
  hparams::RawHparams bundled("test.yaml");
  for (const auto& entry : own.entries()) bundled.add({entry.key, entry.value, entry.where, /*bundled=*/true});
  (void)editors::make_editor("rome", bundled, model, Log({told}));
  EXPECT_EQ(told->count("hparams.ignored"), 0);
}

// One key for the direction and the constraint, in both variants.
TEST(RRome, TheConstrainedKeyIsTheOneOfTheDirection) {
  for (const bool plain : {false, true}) {
    models::Model model = tiny_model();
    editors::Trace trace;
    EditContext context;
    context.trace = &trace;
    const at::Tensor before = paper(model, 1);
    const std::string flags = plain ? "enable_prompt_keys: true\nenable_random_prefix_keys: false\n" : "";
    (void)edit(model, {tiny_facts()[0]}, context, "layers: [1]\n" + flags, "r-rome");
    const at::Tensor keys = trace.at("case.3.cur_input").to(at::kDouble),
                     values = trace.at("case.3.cur_output").to(at::kDouble);
    EXPECT_EQ(keys.size(0), plain ? 1 : 3);
    EXPECT_TRUE(at::equal(trace.at("case.3.keys_per_context").to(at::kDouble), keys));
    const at::Tensor key = keys.mean(0), value = values.mean(0);
    const at::Tensor moved = value + (paper(model, 1) - before).to(at::kDouble).mv(key);
    EXPECT_LT(relative_difference(moved, trace.at("case.3.v_target")), 1e-4);
    // The value: t0 + δ with the sampled contexts, the current value + δ with the plain prompt.
    const at::Tensor delta = trace.at("case.3.z.delta_steps").to(at::kDouble);
    const at::Tensor wanted =
        (plain ? value : trace.at("case.3.z.target_init").to(at::kDouble)) + delta[delta.size(0) - 1];
    EXPECT_LT(relative_difference(trace.at("case.3.v_target"), wanted), 1e-6);
  }
}

TEST(RRome, WithTheOriginalDirectionAndThePlainKeyItIsRome) {
  models::Model rome = tiny_model({.dtype = at::kDouble}), rebuilt = tiny_model({.dtype = at::kDouble});
  EditContext a, b;
  (void)edit(rome, {tiny_facts()[0]}, a);
  (void)edit(rebuilt, {tiny_facts()[0]}, b,
             "layers: [1]\noriginal_implementation: true\nenable_prompt_keys: true\nenable_random_prefix_keys: false\n",
             "r-rome");
  EXPECT_LT(relative_difference(paper(rebuilt, 1), paper(rome, 1)), 1e-12);
}

TEST(RRome, ExactlyOneKindOfKeys) {
  const models::Model model = tiny_model();
  for (const std::string flags : {"enable_prompt_keys: true\n", "enable_random_prefix_keys: false\n"})
    testing::expect_refused([&] { (void)testing::tiny_editor("r-rome", "layers: [1]\n" + flags, model); },
                            ErrorClass::kInvalidArgument, {"exactly one"});
}

// One fact, nothing allowed to be missed: the equality constraint has one solution, whoever asks.
TEST(RRome, IsEmmetForOneFactWithTheSameKey) {
  for (const char* family : {"llama", "gpt2"}) {
    models::Model model = tiny_model({.family = family});
    const auto statistics = testing::tiny_statistics(model);
    const auto emmet = testing::tiny_editor("emmet", "layers: [1]\nemmet_lambda: 0\nmom2_update_weight: 7\n", model);
    editors::Trace trace;
    EditContext context;
    context.trace = &trace;
    (void)edit(model, {tiny_facts()[1]}, context, "layers: [1]\n", "r-rome");
    editors::LayerProblem problem;
    problem.layer = 1;
    problem.site = model.edit_site(1);
    problem.moment = statistics.get(1);
    problem.keys_FN = trace.at("case.7.cur_input").to(at::kDouble).mean(0, true).t();
    problem.residual_DN =
        trace.at("case.7.v_target").unsqueeze(1) - trace.at("case.7.cur_output").to(at::kDouble).mean(0, true).t();
    EXPECT_LT(relative_difference(testing::solved(*emmet, problem), trace.at("case.7.weight_change")), 1e-6) << family;
  }
}

}  // namespace rome_test
}  // namespace emend
