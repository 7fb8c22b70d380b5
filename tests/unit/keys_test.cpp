#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/devices/runtime.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/keys.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/spread_plan.h"

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

TEST(Keys, AveragesByGroup) {
  const editors::ContextTemplates contexts{{{"{}"}, {"a {}", "b {}", "c {}", "d {}", "e {}"}}, false, 0};
  const at::Tensor keys = testing::random_matrix(12, 3, 1);
  const at::Tensor grouped = editors::average_keys(keys, contexts);
  EXPECT_LT(relative_difference(grouped[1], keys[6] / 2 + keys.narrow(0, 7, 5).sum(0) / 10), 1e-14);
  const editors::ContextTemplates one{{{"{}", "a {}", "b {}"}}, false, 0};
  EXPECT_LT(relative_difference(editors::average_keys(keys, one)[0], keys.narrow(0, 0, 3).sum(0) / 3), 1e-14);
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

// A walk sees edits of lower layers, and that a layer's own keys do not depend on its own output.
void expect_walk(models::Model& model, editors::LayerWalk& walk, const std::vector<PromptRow>& rows,
                 const std::vector<size_t>& some) {
  const auto chosen = mapped(some, [&](const size_t i) { return rows[i]; });
  editors::EditTransaction transaction(model);
  for (const int layer : {0, 1, 3}) {
    SCOPED_TRACE("layer " + std::to_string(layer));
    walk.advance_to(layer);
    const at::Tensor expected = one_by_one(model, rows, {Site::kMlpDownIn, layer});
    EXPECT_LT(relative_difference(walk.keys(), expected), 1e-5);
    EXPECT_LT(
        relative_difference(walk.values({Site::kLayerOut, 3}, some), one_by_one(model, chosen, {Site::kLayerOut, 3})),
        1e-5);
    (void)editors::apply_delta(editors::WeightDelta::dense(model.edit_site(layer), testing::random_matrix(32, 48, 7)),
                               transaction);
    EXPECT_LT(relative_difference(walk.keys(), expected), 1e-5);
  }
}

TEST(Keys, WalkSeesEditsOfLowerLayers) {
  for (const auto engine : {Engine::kFast, Engine::kReference}) {
    models::Model model = tiny_model({.family = "gpt2"});
    const auto rows = rows_of(model);
    EditContext context;
    context.engine = engine;
    editors::LayerWalk walk(model, rows, context);
    expect_walk(model, walk, rows, {0, 3, 6, 9});
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
    SCOPED_TRACE(family);
    editors::LayerWalk walk(model, rows, context, true);
    expect_walk(model, walk, rows, {2, 3, 9, 24, 25, 27});
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
  const models::Model model = tiny_model({.place = testing::over_devices({device})});
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
