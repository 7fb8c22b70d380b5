#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/runtime.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/keys.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/simulated.h"

namespace emend {
namespace keys_test {

using editors::EditContext;
using editors::Engine;
using editors::PromptRow;
using hooks::Site;
using testing::relative_difference;
using testing::tiny_model;

std::vector<PromptRow> rows_of(const models::Model& model) {
  std::vector<PromptRow> rows;
  for (const auto& fact : testing::tiny_facts()) {
    const auto rendered = editors::render_prompts(model.tokenizer(), fact, testing::tiny_contexts());
    rows.insert(rows.end(), rendered.rows.begin(), rendered.rows.end());
  }
  return rows;
}

// One row, whole and alone, through the whole model.
at::Tensor one_by_one(const models::Model& model, const std::vector<PromptRow>& rows, hooks::SiteRef site) {
  std::vector<at::Tensor> values;
  for (const auto& row : rows) {
    hooks::HookSession session(model.hooks());
    session.capture(site).attach();
    (void)model.forward(models::TokenBatch::from_rows({row.ids}));
    values.push_back(session.captured(site)[row.lookup].clone());
  }
  return at::stack(values);
}

TEST(Keys, AveragesByGroupOrPlainly) {
  const editors::ContextTemplates contexts{{{"{}"}, {"a {}", "b {}", "c {}", "d {}", "e {}"}}, false, 0};
  const at::Tensor keys = testing::random_matrix(12, 3, 1);
  const at::Tensor grouped = editors::average_keys(keys, contexts, editors::KeyWeighting::kByGroup);
  EXPECT_LT(relative_difference(grouped[1], keys[6] / 2 + keys.narrow(0, 7, 5).sum(0) / 10), 1e-14);
  const at::Tensor plain = editors::average_keys(keys, contexts, editors::KeyWeighting::kPlainMean);
  EXPECT_LT(relative_difference(plain[0], keys.narrow(0, 0, 6).sum(0) / 6), 1e-14);
  // One group: both are the same.
  const editors::ContextTemplates one{{{"{}", "a {}", "b {}"}}, false, 0};
  EXPECT_LT(relative_difference(editors::average_keys(keys, one, editors::KeyWeighting::kByGroup),
                                editors::average_keys(keys, one, editors::KeyWeighting::kPlainMean)),
            1e-15);
}

TEST(Keys, CollectsWhatTheWholeModelComputes) {
  for (const char* family : {"llama", "gpt2"}) {
    const models::Model model = tiny_model({.family = family});
    const auto rows = rows_of(model);
    const std::vector<hooks::SiteRef> sites = {
        {Site::kMlpDownIn, 1}, {Site::kMlpDownOut, 1}, {Site::kLayerOut, 2}, {Site::kAttnOut, 0}};
    for (const auto engine : {Engine::kFast, Engine::kReference}) {
      EditContext context;
      context.engine = engine;
      const auto values = editors::collect_at_lookup(model, rows, sites, context);
      ASSERT_EQ(values.size(), sites.size());
      for (size_t s = 0; s < sites.size(); ++s)
        EXPECT_LT(relative_difference(values[s], one_by_one(model, rows, sites[s])), 1e-5)
            << family << " " << hooks::to_string(sites[s]);
    }
  }
}

TEST(Keys, RowsWithTheSameTokensShareTheirKey) {
  const models::Model model = tiny_model();
  const auto rows = rows_of(model);
  EditContext context;
  const at::Tensor keys = editors::collect_at_lookup(model, rows, {{Site::kMlpDownIn, 3}}, context)[0];
  // Facts 0 and 3 have the same subject at the same place.
  for (int64_t c = 0; c < 3; ++c) EXPECT_TRUE(at::equal(keys[c], keys[9 + c]));
  EXPECT_FALSE(at::equal(keys[0], keys[3]));
}

TEST(Keys, WalkSeesEditsOfLowerLayers) {
  for (const auto engine : {Engine::kFast, Engine::kReference}) {
    models::Model model = tiny_model({.family = "gpt2"});
    const auto rows = rows_of(model);
    EditContext context;
    context.engine = engine;
    editors::EditTransaction transaction(model);
    editors::LayerWalk walk(model, rows, context);
    const std::vector<size_t> plain = {0, 3, 6, 9};
    for (const int layer : {0, 1, 3}) {
      walk.advance_to(layer);
      const at::Tensor expected = one_by_one(model, rows, {Site::kMlpDownIn, layer});
      EXPECT_LT(relative_difference(walk.keys(), expected), 1e-5) << "layer " << layer;
      std::vector<PromptRow> plain_rows;
      for (const size_t i : plain) plain_rows.push_back(rows[i]);
      EXPECT_LT(relative_difference(walk.values({Site::kLayerOut, 3}, plain),
                                    one_by_one(model, plain_rows, {Site::kLayerOut, 3})),
                1e-5);
      const auto site = model.edit_site(layer);
      const at::Tensor before = expected.clone();
      (void)editors::apply_delta(editors::WeightDelta::dense(site, testing::random_matrix(32, 48, 7)), transaction);
      EXPECT_LT(relative_difference(walk.keys(), before), 1e-5) << "a layer's own keys do not depend on its own output";
    }
  }
}

// Beginnings that rows share are computed once, the first time the walk needs them and whenever it goes up.
TEST(Keys, WalkSharesBeginnings) {
  for (const char* family : {"gpt2", "llama"}) {
    models::Model model = tiny_model({.family = family});
    std::vector<PromptRow> rows;
    for (int64_t r = 0; r < 24; ++r) {  // three beginnings of 12 tokens, rows of their own, one that is a beginning
      PromptRow row;
      for (int64_t t = 0; t < 12 && r % 4 < 3; ++t) row.ids.push_back(3 + (7 * t + r % 4) % 40);
      for (int64_t t = 0; t < 1 + r / 4; ++t) row.ids.push_back(3 + (5 * t + 3 * r) % 40);
      row.lookup = std::ssize(row.ids) - 1;
      row.ids.push_back(9);
      rows.push_back(row);
    }
    rows.push_back(rows[0]);
    rows.back().ids.resize(12);
    rows.back().lookup = 11;
    for (const int64_t lookup : {4, 0, 13}) {  // read on the way of others
      rows.push_back(rows[16]);
      rows.back().lookup = lookup;
    }
    EditContext context;
    editors::EditTransaction transaction(model);
    editors::LayerWalk walk(model, rows, context, true);
    for (const int layer : {0, 1, 3}) {
      walk.advance_to(layer);
      EXPECT_LT(relative_difference(walk.keys(), one_by_one(model, rows, {Site::kMlpDownIn, layer})), 1e-5)
          << family << ", layer " << layer;
      const std::vector<size_t> some = {2, 3, 9, 24, 25, 27};
      std::vector<PromptRow> chosen;
      for (const size_t i : some) chosen.push_back(rows[i]);
      EXPECT_LT(
          relative_difference(walk.values({Site::kLayerOut, 3}, some), one_by_one(model, chosen, {Site::kLayerOut, 3})),
          1e-5)
          << family << ", layer " << layer;
      (void)editors::apply_delta(editors::WeightDelta::dense(model.edit_site(layer), testing::random_matrix(32, 48, 7)),
                                 transaction);
    }
  }
}

TEST(Keys, HooksAreFreeAfterwards) {
  const models::Model model = tiny_model();
  const auto rows = rows_of(model);
  EditContext context;
  (void)editors::collect_at_lookup(model, rows, {{Site::kMlpDownIn, 1}}, context);
  for (int layer = 0; layer < 4; ++layer) EXPECT_TRUE(model.hooks().at({Site::kMlpDownIn, layer}).idle());
}

TEST(Keys, CanBeCancelled) {
  const models::Model model = tiny_model();
  const auto rows = rows_of(model);
  for (const auto engine : {Engine::kFast, Engine::kReference}) {
    EditContext context;
    context.engine = engine;
    context.cancel.request();
    EXPECT_THROW((void)editors::collect_at_lookup(model, rows, {{Site::kMlpDownIn, 1}}, context), Error);
  }
}

// The keys of 10,000 facts of GPT-J are 4 GB: parts, their concatenation and a selection of it would be 12.
TEST(Keys, AreHeldOnce) {
  const auto device = testing::sim(6);
  testing::TinyOptions options;
  options.place = [device](const models::ModelConfig& config, const models::Checkpoint&) {
    return devices::PlacementPlan::single(device, config.n_layers);
  };
  const models::Model model = tiny_model(options);
  std::vector<PromptRow> rows(60000);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].ids = {static_cast<int64_t>(i % 250), static_cast<int64_t>(i / 250)};
    rows[i].lookup = 1;
  }
  devices::reset_peak_memory(device);
  const int64_t before = devices::device_memory_stats(device).allocated;
  const auto keys = editors::collect_at_lookup(model, rows, {{Site::kMlpDownIn, 0}}, EditContext());
  const int64_t result = keys[0].numel() * 4;
  EXPECT_EQ(devices::device_memory_stats(device).allocated - before, result);
  EXPECT_LT(devices::device_memory_stats(device).peak - before, 2 * result);
}

}  // namespace keys_test
}  // namespace emend
