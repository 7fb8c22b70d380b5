// What every registered editor promises, asked of each line of methods.def. A new editor is covered by its line.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/locate.h>
#include <emend/editors/steps/transaction.h>
#include <emend/models/config.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "support/editor_models.h"
#include "support/error_of.h"
#include "support/spread_plan.h"

namespace emend {
namespace editor_conformance_test {

using editors::EditContext;
using editors::EditorInfo;
using editors::EditResult;
using testing::all_weights;
using testing::changed_weights;

// Small settings for any editor: one layer, few steps; otherwise its own defaults. NSE's limits are those of large
// models.
hparams::RawHparams small_hparams(const EditorInfo& info) {
  static const std::map<std::string, std::string> apart = {{"nse", "alpha: 0\nupper_bound: 1e9\n"}};
  std::string text;
  for (const auto& field : info.fields()) {
    if (field.name == "layers") text += "layers: [1]\n";
    if (field.name == "text_tokens") text += "text_tokens: 512\n";
    if (field.name == "release_layers") text += "release_layers: [2]\n";
    if (field.name == "v_num_grad_steps" || field.name == "num_steps") text += field.name + ": 3\n";
  }
  if (const auto more = apart.find(info.name); more != apart.end()) text += more->second;
  if (text.empty()) text = info.fields().at(0).name + ": " + info.fields()[0].default_text + "\n";
  return hparams::parse_hparams(text, "conformance.yaml");
}

// Moments with small and large eigenvalues, so that methods that look for unused directions find some.
editors::FixedStatistics statistics_of(const models::Model& model) {
  std::map<int, editors::SecondMoment> moments;
  for (int layer = 0; layer < model.n_layers(); ++layer) {
    const int64_t width = model.edit_site(layer).in_features;
    const at::Tensor q =
        std::get<0>(at::linalg_qr(testing::random_matrix(width, width, 40 + static_cast<uint64_t>(layer))));
    const at::Tensor spectrum = at::logspace(-4, 0.5, width, 10.0, at::TensorOptions().dtype(at::kDouble));
    at::Tensor cov = (q * spectrum).mm(q.t());
    moments.emplace(layer, editors::SecondMoment((cov + cov.t()) / 2, 1000));
  }
  return editors::FixedStatistics(std::move(moments));
}

EditResult run(const EditorInfo& info, models::Model& model, const std::vector<datasets::Fact>& facts,
               EditContext& context) {
  auto statistics = statistics_of(model);
  context.statistics = &statistics;
  if (!context.contexts) context.contexts = testing::tiny_contexts();
  const auto editor = info.make(small_hparams(info), model, {});
  EXPECT_EQ(editor->name(), info.name);
  EditResult result = editor->edit(model, facts, context);
  context.statistics = nullptr;
  return result;
}

using Place = std::function<devices::PlacementPlan(const models::ModelConfig&, const models::Checkpoint&)>;

models::Model family_model(const std::string& family, const Place& place = {}) {
  return testing::flavour_model({family, ""}, 5, place);
}

TEST(EveryEditor, IsListedOnceAndDescribesItself) {
  std::set<std::string> names;
  for (const auto& info : editors::all_editors()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_FALSE(info.summary.empty()) << info.name;
    EXPECT_FALSE(info.paper.empty()) << info.name;
    ASSERT_FALSE(info.fields().empty()) << info.name;
    EXPECT_TRUE(info.effective(small_hparams(info), {}).is_object()) << info.name;
    EXPECT_EQ(&editors::find_editor(info.name), &info);
  }
  EXPECT_GE(names.size(), 7U);
  EXPECT_EQ(editors::find_editor("R_ROME").name, "r-rome");
  testing::expect_refused([] { (void)editors::find_editor("memmit"); }, ErrorClass::kInvalidArgument,
                          {"did you mean \"memit\""});
}

TEST(EveryEditor, ChangesOnlyWhatItReportsAndTheReportRebuildsIt) {
  for (const auto& info : editors::all_editors()) {
    SCOPED_TRACE(info.name);
    models::Model model = testing::tiny_model(), rebuilt = testing::tiny_model();
    const auto before = all_weights(model);
    EditContext context;
    const EditResult result = run(info, model, testing::tiny_facts(), context);
    ASSERT_EQ(result.outcomes.size(), 4U);
    EXPECT_EQ(result.failed(), 0) << result.outcomes[0].reason;
    std::set<std::string> reported;
    editors::EditTransaction transaction(rebuilt);
    for (const auto& delta : result.deltas) {
      reported.insert(delta.weight);
      (void)editors::apply_delta(delta, transaction);
    }
    const auto changed = changed_weights(model, before);
    EXPECT_EQ(changed.empty(), result.deltas.empty());
    EXPECT_EQ(info.changes_weights, !changed.empty());
    EXPECT_EQ(info.runtime.has_value(), !info.changes_weights) << "what lies beside the weights says how it is read";
    for (const auto& name : changed) {
      EXPECT_TRUE(reported.contains(name)) << name << " changed without a word";
      EXPECT_LT(testing::relative_difference(rebuilt.weight(name), model.weight(name)), 1e-5);
    }
    EXPECT_NO_THROW((void)result.to_json().dump());
  }
}

TEST(EveryEditor, IsUndoneBitForBit) {
  for (const auto& info : editors::all_editors()) {
    models::Model model = testing::tiny_model({.dtype = at::kBFloat16});
    const auto before = all_weights(model);
    {
      editors::EditTransaction transaction(model);
      EditContext context;
      context.transaction = &transaction;
      (void)run(info, model, testing::tiny_facts(), context);
    }
    EXPECT_TRUE(changed_weights(model, before).empty()) << info.name;
  }
}

TEST(EveryEditor, ChangesNothingForNoFactsAndStopsWhenAsked) {
  for (const auto& info : editors::all_editors()) {
    models::Model model = testing::tiny_model();
    const auto before = all_weights(model);
    EditContext empty, cancelled;
    const EditResult nothing = run(info, model, {}, empty);
    EXPECT_TRUE(nothing.deltas.empty() && nothing.outcomes.empty()) << info.name;
    EXPECT_EQ(nothing.editor, info.name);
    EXPECT_TRUE(changed_weights(model, before).empty()) << info.name;
    cancelled.cancel.request();
    SCOPED_TRACE(info.name);
    (void)testing::error_of([&] { (void)run(info, model, testing::tiny_facts(), cancelled); }, ErrorClass::kCancelled);
    EXPECT_TRUE(changed_weights(model, before).empty()) << info.name;
  }
}

TEST(EveryEditor, IsDeterministic) {
  for (const auto& info : editors::all_editors()) {
    models::Model first = testing::tiny_model(), second = testing::tiny_model();
    EditContext a, b;
    (void)run(info, first, testing::tiny_facts(), a);
    (void)run(info, second, testing::tiny_facts(), b);
    EXPECT_TRUE(changed_weights(first, all_weights(second)).empty()) << info.name;
  }
}

// Three kinds of blocks: gated MLP behind RMS norms, Conv1D with a position table, attention and MLP side by side.
TEST(EveryEditor, WritesTheSameOverThreeDevicesInEveryKindOfBlock) {
  const std::vector<datasets::Fact> facts = {testing::tiny_facts()[0], testing::tiny_facts()[1]};
  const auto over_three = testing::over_devices({testing::sim(0), testing::sim(1), testing::sim(2)});
  for (const char* family : {"llama", "gpt2", "gptj"}) {
    for (const auto& info : editors::all_editors()) {
      SCOPED_TRACE(info.name + " on " + family);
      models::Model one = family_model(family), three = family_model(family, over_three);
      ASSERT_EQ(three.placement().devices().size(), std::min<size_t>(3, static_cast<size_t>(one.n_layers())));
      const auto before = all_weights(one);
      EditContext on_one, on_three;
      const EditResult expected = run(info, one, facts, on_one), got = run(info, three, facts, on_three);
      EXPECT_EQ(expected.failed(), 0) << expected.outcomes[0].reason;
      EXPECT_EQ(got.failed(), 0) << got.outcomes[0].reason;
      const auto changed = changed_weights(one, before);
      EXPECT_EQ(changed.empty(), expected.deltas.empty());
      for (const auto& name : one.weight_names()) {
        const at::Tensor there = devices::to_host(three.weight(name).detach());
        if (std::find(changed.begin(), changed.end(), name) == changed.end()) {
          EXPECT_TRUE(at::equal(there, before.at(name))) << name << " is none of its business";
        } else {
          EXPECT_LT(testing::relative_difference(there, one.weight(name)), 1e-6) << name;
        }
      }
    }
  }
}

// Methods that solve for all facts at once must not care which one is named first, but for those whose targets hang on
// the earlier facts'.
TEST(EveryEditor, OfTheClosedFormDoesNotCareAboutTheOrderOfFacts) {
  int checked = 0;
  for (const auto& info : editors::all_editors()) {
    models::Model forward = testing::tiny_model({.dtype = at::kDouble}),
                  backward = testing::tiny_model({.dtype = at::kDouble});
    const auto editor = info.make(small_hparams(info), forward, {});
    const auto* locate = dynamic_cast<const editors::LocateEditor*>(editor.get());
    if (locate == nullptr) continue;
    ++checked;
    const auto before = all_weights(forward);
    auto facts = testing::tiny_facts();
    EditContext a, b;
    (void)run(info, forward, facts, a);
    std::reverse(facts.begin(), facts.end());
    (void)run(info, backward, facts, b);
    for (const auto& name : changed_weights(forward, before)) {
      const double difference =
          testing::relative_difference(backward.weight(name) - before.at(name), forward.weight(name) - before.at(name));
      EXPECT_EQ(difference > 1e-6, locate->recipe().optimise != nullptr) << info.name << ": " << difference;
    }
  }
  EXPECT_GE(checked, 4);
}

}  // namespace editor_conformance_test
}  // namespace emend
