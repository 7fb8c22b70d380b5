// The methods that remember, mask or restrain: batches on tiny models.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/key_cache.h>
#include <emend/hooks/hook_session.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "support/editor_models.h"
#include "support/sequential_editors.h"

namespace emend {
namespace sequential_editors_test {

using editors::Editor;
using testing::kAlphaEdit;
using testing::kMemit;
using testing::make_fact;
using testing::random_matrix;
using testing::relative_difference;
using testing::sequential_yaml;
using testing::tiny_editor;

TEST(KeyCache, KeepsOnlyTheSumOnceThereAreManyKeys) {
  editors::KeyCache cache;
  at::Tensor expected = at::zeros({6, 6}, at::kDouble);
  for (uint64_t batch = 0; batch < 5; ++batch) {
    const at::Tensor keys = random_matrix(6, 3, batch).to(at::kFloat);
    cache.add({keys, keys * 2});
    expected = expected + keys.to(at::kDouble).mm(keys.to(at::kDouble).t());
    EXPECT_EQ(cache.layer(0).keys_FP.defined(), batch < 2);
    EXPECT_LT(relative_difference(cache.layer(0).gram_FF(), expected), 1e-12);
    EXPECT_LT(relative_difference(cache.layer(1).gram_FF(), expected * 4), 1e-12);
  }
  EXPECT_THROW(cache.add({random_matrix(6, 1, 0)}), Error);                          // another number of layers
  EXPECT_THROW(cache.add({random_matrix(6, 1, 0), random_matrix(5, 1, 0)}), Error);  // another width
  EXPECT_LT(relative_difference(cache.layer(0).gram_FF(), expected), 1e-12) << "a refused batch left something";
}

TEST(KeyCache, RefusesAStateThatIsNotOne) {
  const at::Tensor keys = random_matrix(6, 3, 1);
  for (const auto& state : std::vector<std::map<std::string, at::Tensor>>{{{"keys", keys}},
                                                                          {{"keys.", keys}},
                                                                          {{"keys.x", keys}},
                                                                          {{"keys.7", keys}},
                                                                          {{"other.0", keys}},
                                                                          {{"sum.0", keys}},
                                                                          {{"keys.0", keys[0]}},
                                                                          {{"keys.99999999999999999999", keys}}}) {
    editors::KeyCache cache;
    EXPECT_THROW(cache.load(state), Error) << state.begin()->first;
    EXPECT_TRUE(cache.state().empty());
  }
}

// Three facts with different subjects, in two batches.
std::vector<datasets::Fact> first_batch() {
  return {make_fact(1, "{} is in", "Oslo", "Rome"), make_fact(2, "The home of {} is", "Ada", "Po")};
}
std::vector<datasets::Fact> second_batch() {
  return {make_fact(3, "In {}, one speaks", "Ur", "Latin")};
}

// The change of the edited weights after both batches; `between` may replace the editor.
std::map<std::string, at::Tensor> edit_twice(
    const std::string& name, const std::string& yaml,
    const std::function<void(std::unique_ptr<Editor>&, models::Model&)>& between, bool reversed = false) {
  testing::TinyEdit tiny;
  auto editor = tiny_editor(name, yaml, tiny.model);
  auto facts = first_batch();
  if (reversed) std::reverse(facts.begin(), facts.end());
  (void)editor->edit(tiny.model, facts, tiny.context);
  if (between) between(editor, tiny.model);
  (void)editor->edit(tiny.model, second_batch(), tiny.context);
  (void)editor->finish(tiny.model, tiny.context);
  return testing::all_weights(tiny.model);
}

const std::vector<std::pair<std::string, std::string>> kSequential = {
    {"alphaedit", kAlphaEdit},
    {"sphere", kAlphaEdit},
    {"memit-seq", kMemit},
    {"nse", kMemit},
    {"rect", kMemit},
    {"prune", kMemit},
    {"rlsedit", kMemit},
    {"memit-fe", kMemit},
    {"core", kMemit + "reg_lambda: 0.1\nlayer_range: 2\n"},
    {"lyaplock", kMemit + "alpha: 0.5\n"},
    {"alphaedit", kAlphaEdit + "suit: 0.4\n"},
    {"rect", kMemit + "history: true\n"},
    {"prune", kMemit + "history: true\n"},
    {"memit", kMemit + "nas: true\nrevive: 0.3\nsimie: 2\n"},
    {"alphaedit", kAlphaEdit + "nas: true\nrevive: 0.3\n"}};

TEST(RlsEdit, RemembersTheKeysThatABatchWasWrittenWith) {
  testing::TinyEdit tiny;
  editors::Trace trace;
  tiny.context.trace = &trace;
  const auto rls = tiny_editor("rlsedit", kMemit, tiny.model);
  (void)rls->edit(tiny.model, first_batch(), tiny.context);
  for (const std::string layer : {"1", "2"}) {
    const at::Tensor kept = rls->state().at(layer == "1" ? "keys.0" : "keys.1").to(at::kDouble);
    EXPECT_LT(relative_difference(kept, trace.at("layer." + layer + ".keys").to(at::kDouble)), 1e-6) << layer;
  }
}

// Norm-Anchor Scaling does not write a value that is too long, and says so.
TEST(Nas, WhatIsNotWrittenHasFailed) {
  testing::TinyEdit tiny;
  const auto before = tiny.model.weight(tiny.model.edit_site(1).weight_name).clone();
  const auto result = tiny_editor("memit", kMemit + "nas: true\nnas_norm: 1e-6\n", tiny.model)
                          ->edit(tiny.model, first_batch(), tiny.context);
  EXPECT_EQ(result.failed(), std::ssize(first_batch()));
  for (const auto& outcome : result.outcomes)
    EXPECT_NE(outcome.reason.find("more than twice the anchor"), std::string::npos) << outcome.reason;
  EXPECT_LT((tiny.model.weight(tiny.model.edit_site(1).weight_name) - before).abs().max().item<double>(), 1e-6);
}

// CoRE adds to MEMIT's loss the distances of all pairs of contexts: the formula itself on states that are read apart
// from the optimisation, and less distance in the end. Without weight it is MEMIT.
TEST(Core, DrawsContextsTogether) {
  const auto run = [](const std::string& name, const std::string& more) {
    testing::TinyEdit tiny({.dtype = at::kDouble});
    editors::EditResult result =
        tiny_editor(name, "layers: [1]\nv_num_grad_steps: 9\nv_lr: 0.1\nv_weight_decay: 0\nkl_factor: 0\n" + more,
                    tiny.model)
            ->edit(tiny.model, first_batch(), tiny.context);
    return std::pair(std::move(tiny.model), std::move(result));
  };
  const auto [memit, plain] = run("memit", "");
  const auto [core, same] = run("core", "layer_range: 2\n");
  for (const auto& [weight, value] : testing::all_weights(memit))
    EXPECT_TRUE(at::equal(testing::all_weights(core).at(weight), value)) << weight;

  const auto unedited = testing::tiny_model({.dtype = at::kDouble});
  const auto apart = [&](const models::Model& model, const datasets::Fact& fact) {
    const auto prompts = editors::render_prompts(model.tokenizer(), fact, testing::tiny_contexts(), {});
    double sum = 0;
    for (const int layer : {2, 3}) {
      std::vector<at::Tensor> states;
      for (const auto& row : prompts.rows) {
        hooks::HookSession session(model.hooks());
        session.capture({hooks::Site::kLayerOut, layer}, {.tokens = std::vector<int64_t>{row.lookup}}).attach();
        (void)model.forward(models::TokenBatch::from_rows({row.ids}));
        states.push_back(session.captured({hooks::Site::kLayerOut, layer})[0]);
      }
      for (size_t i = 0; i < states.size(); ++i)
        for (size_t j = i + 1; j < states.size(); ++j)
          sum += (states[i] - states[j]).square().sum().item<double>() / static_cast<double>(states[i].numel());
    }
    return sum / 2;
  };
  const auto [drawn, result] = run("core", "reg_lambda: 0.3\nlayer_range: 2\n");
  for (size_t i = 0; i < first_batch().size(); ++i) {
    const datasets::Fact fact = first_batch()[i];
    EXPECT_NEAR(result.outcomes[i].curve[0].weight_decay, 0.3 * apart(unedited, fact), 1e-9);
    EXPECT_GT(apart(unedited, fact), 0.01);
    EXPECT_LT(result.outcomes[i].last.weight_decay, result.outcomes[i].curve[0].weight_decay);
  }
}

// One layer: nothing is left to replay. Several: once the first layer gives its target, the others have nothing to do.
// That is exact where the subject is the first token: no other token, changed as well, is looked at.
TEST(MemitFe, ReplaysTheFirstLayersTarget) {
  const auto run = [](const std::string& name, const std::string& yaml, editors::Trace* trace) {
    auto model = testing::tiny_model();
    auto statistics = testing::tiny_statistics(model);
    editors::EditContext context;
    context.contexts = editors::ContextTemplates::plain();
    context.statistics = &statistics;
    context.trace = trace;
    datasets::Fact fact = first_batch()[0];
    fact.subject = "Q";
    fact.prompt = "{} lives in";
    (void)tiny_editor(name, yaml, model)->edit(model, {&fact, 1}, context);
    return testing::all_weights(model);
  };
  const std::string one = "layers: [2]\nv_num_grad_steps: 6\nv_lr: 0.1\nmom2_update_weight: 3\n";
  const auto memit = run("memit", one, nullptr), replayed = run("memit-fe", one, nullptr);
  for (const auto& [weight, value] : memit) EXPECT_LT(relative_difference(replayed.at(weight), value), 1e-6) << weight;
  editors::Trace trace;
  (void)run("memit-fe", "layers: [1, 2]\nv_num_grad_steps: 6\nv_lr: 0.1\nmom2_update_weight: 1e-9\n", &trace);
  const double first = trace.at("layer.1.targets").norm().item<double>(),
               second = trace.at("layer.2.targets").norm().item<double>();
  EXPECT_GT(first, 1e-2);
  EXPECT_LT(second, 1e-3 * first) << "the replay differs from what the written model does";
}

TEST(SequentialEditors, ANewInstanceWithTheStateGoesOn) {
  for (const auto& [name, yaml] : kSequential) {
    const auto straight = edit_twice(name, yaml, {});
    const auto resumed =
        edit_twice(name, yaml, [&, &n = name, &y = yaml](std::unique_ptr<Editor>& editor, models::Model& model) {
          const auto state = editor->state();
          editor = tiny_editor(n, y, model);
          editor->load_state(state);
        });
    for (const auto& [weight, value] : straight) EXPECT_TRUE(at::equal(value, resumed.at(weight))) << name << weight;
  }
}

TEST(SequentialEditors, ForgettingMakesADifferenceWhereThereIsAMemory) {
  const auto forget = [](std::unique_ptr<Editor>& editor, models::Model&) { editor->reset(); };
  for (const std::string name : {"alphaedit", "memit-seq", "sphere", "nse"}) {
    const std::string& yaml = name == "memit-seq" || name == "nse" ? kMemit : kAlphaEdit;
    const auto remembered = edit_twice(name, yaml, {}), forgotten = edit_twice(name, yaml, forget);
    const std::string weight = "model.layers.1.mlp.down_proj.weight";
    EXPECT_FALSE(at::equal(remembered.at(weight), forgotten.at(weight))) << name;
  }
}

TEST(SequentialEditors, TheOrderOfTheFactsDoesNotMatter) {
  for (const auto& [name, yaml] : kSequential) {
    const auto straight = edit_twice(name, yaml, {}, false), reversed = edit_twice(name, yaml, {}, true);
    // What memit-fe writes above its first layer is the difference of two float32 passes that nearly agree.
    const double limit = std::string(name) == "memit-fe" ? 5e-5 : 1e-6;
    for (const auto& [weight, value] : straight)
      EXPECT_LT(relative_difference(reversed.at(weight), value), limit) << name << ' ' << weight;
  }
}

TEST(SequentialEditors, ABatchThatFailsLeavesTheMemoryAsItWas) {
  for (const auto& method : kSequential) {
    const std::string& name = method.first;
    testing::TinyEdit tiny;
    auto editor = tiny_editor(name, method.second, tiny.model);
    const auto fails = [&] {
      const auto before = testing::all_weights(tiny.model);
      const auto state = editor->state();
      tiny.context.progress = [](const ProgressUpdate& progress) {
        if (progress.phase == "insert" && progress.done >= 1)
          throw Error(ErrorClass::kCancelled, {"test", "stop", "", ""});
      };
      EXPECT_THROW((void)editor->edit(tiny.model, first_batch(), tiny.context), Error) << name;
      tiny.context.progress = {};
      EXPECT_TRUE(testing::changed_weights(tiny.model, before).empty()) << name;
      const auto after = editor->state();
      ASSERT_EQ(after.size(), state.size()) << name;
      for (const auto& [key, value] : state) EXPECT_TRUE(at::equal(after.at(key), value)) << name << ' ' << key;
    };
    fails();
    (void)editor->edit(tiny.model, second_batch(), tiny.context);
    fails();
  }
}

// The singular values of ΔW after finish() are the paper's, whatever was written.
TEST(Prune, RestrainsTheSumOfAllChanges) {
  for (const char* family : {"llama", "gpt2"}) {
    testing::TinyEdit tiny({.family = family});
    const auto editor = tiny_editor("prune", kMemit + "restraint_base: 50\n", tiny.model);
    const std::string weight = tiny.model.edit_site(1).weight_name;
    const at::Tensor original = tiny.model.weight(weight).detach().clone();
    (void)editor->edit(tiny.model, first_batch(), tiny.context);
    const double limit = at::linalg_svdvals(original.to(at::kDouble)).max().item<double>();
    // Two directions far above the limit, one below.
    const at::Tensor u = std::get<0>(at::linalg_qr(random_matrix(original.size(0), 3, 1)));
    const at::Tensor v = std::get<0>(at::linalg_qr(random_matrix(original.size(1), 3, 2)));
    const at::Tensor sizes = at::tensor({40 * limit, 7 * limit, 0.5 * limit}, at::kDouble);
    tiny.model.set_weight(weight, (original.to(at::kDouble) + (u * sizes).mm(v.t())).to(at::kFloat));
    const at::Tensor untouched = tiny.model.weight(tiny.model.edit_site(2).weight_name).detach().clone();

    const auto result = editor->finish(tiny.model, tiny.context);
    ASSERT_TRUE(result.has_value()) << family;
    EXPECT_EQ(result->deltas.size(), 1U) << "a layer without large values was written";
    EXPECT_TRUE(at::equal(tiny.model.weight(tiny.model.edit_site(2).weight_name), untouched));
    const at::Tensor got = at::linalg_svdvals((tiny.model.weight(weight) - original).to(at::kDouble)).narrow(0, 0, 3);
    const auto restrained = [&](double factor) { return std::log(factor) / std::log(50.0) + limit; };
    EXPECT_LT(relative_difference(got, at::tensor({std::min(restrained(40), 40 * limit),
                                                   std::min(restrained(7), 7 * limit), 0.5 * limit})),
              1e-4)
        << family << " " << got << " limit " << limit;
    const double bound = limit + std::min(restrained(40), 40 * limit);
    EXPECT_LE(at::linalg_svdvals(tiny.model.weight(weight).to(at::kDouble)).max().item<double>(), bound * (1 + 1e-6));
  }
}

TEST(Prune, DoesNothingBelowTheLimit) {
  testing::TinyEdit tiny;
  const auto editor = tiny_editor("prune", sequential_yaml("mom2_update_weight: 1000\n"), tiny.model);
  EXPECT_FALSE(editor->finish(tiny.model, tiny.context).has_value()) << "before any batch";
  (void)editor->edit(tiny.model, first_batch(), tiny.context);
  const auto before = testing::all_weights(tiny.model);
  EXPECT_FALSE(editor->finish(tiny.model, tiny.context).has_value());
  EXPECT_TRUE(testing::changed_weights(tiny.model, before).empty());
}

// Facts whose residual is small enough sit the second pass out, far ones are refused.
TEST(Nse, LimitsOfTheResidualDecideWhoIsWritten) {
  const auto run = [](const std::string& more) {
    testing::TinyEdit tiny;
    return tiny_editor("nse", kMemit + more, tiny.model)->edit(tiny.model, first_batch(), tiny.context);
  };
  EXPECT_EQ(run("").deltas.size(), 4U) << "two passes over two layers";
  EXPECT_EQ(run("max_iterations: 2\n").deltas.size(), 2U);
  const auto close = run("alpha: 1e6\nupper_bound: 1e7\n");
  EXPECT_TRUE(close.deltas.empty());
  EXPECT_EQ(close.failed(), 0);
  const auto far = run("upper_bound: 1e-6\n");
  EXPECT_TRUE(far.deltas.empty());
  EXPECT_EQ(far.failed(), 2);
  EXPECT_NE(far.outcomes[0].reason.find("limit"), std::string::npos);
  EXPECT_THROW((void)run("alpha: 5\nupper_bound: 4\n"), Error);
}

}  // namespace sequential_editors_test
}  // namespace emend
