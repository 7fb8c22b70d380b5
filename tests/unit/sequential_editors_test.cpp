// The methods that remember, mask or restrain: identities on random matrices and on tiny models.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/key_cache.h>
#include <emend/editors/steps/null_space.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/editor_models.h"

namespace emend {
namespace sequential_editors_test {

using editors::Editor;
using editors::LayerProblem;
using editors::LocateEditor;
using testing::make_fact;
using testing::random_matrix;
using testing::random_spd;
using testing::relative_difference;

constexpr int64_t kHidden = 32, kWidth = 48;

std::string values(const std::string& more = "") {
  return "layers: [1, 2]\nv_num_grad_steps: 6\nv_lr: 0.1\n" + more;
}
const std::string kAlphaEdit = values("nullspace_threshold: 1\nL2: 2\n");
const std::string kMemit = values("mom2_update_weight: 3\n");

std::unique_ptr<Editor> make(const std::string& name, const std::string& yaml, const models::Model& model) {
  return editors::make_editor(name, hparams::parse_hparams(yaml, "test.yaml"), model);
}

// A problem of the right shapes with made-up keys, residuals and statistics.
LayerProblem made_up(const models::Model& model, uint64_t seed = 1, int64_t facts = 5) {
  LayerProblem problem;
  problem.layer = 1;
  problem.count = 2;
  problem.site = model.edit_site(1);
  problem.weight_DF = model.weight(problem.site.weight_name);
  problem.keys_FN = random_matrix(kWidth, facts, seed);
  problem.residual_DN = random_matrix(kHidden, facts, seed + 1);
  problem.moment = editors::SecondMoment(random_spd(kWidth, 7));
  return problem;
}

at::Tensor solved(const Editor& editor, const LayerProblem& problem) {
  return dynamic_cast<const LocateEditor&>(editor).update(problem).delta.matrix();
}

// ΔW of AlphaEdit as published: dense projector, unsymmetric system.
at::Tensor published_alphaedit(const LayerProblem& problem, const at::Tensor& earlier_FP, double threshold, double l2,
                               at::ScalarType dtype) {
  const auto [values, vectors] = at::linalg_eigh(problem.moment.cov_FF());
  const at::Tensor kept = vectors.index_select(1, values.lt(threshold).nonzero().squeeze(1));
  const at::Tensor p = kept.mm(kept.t()).to(dtype), k = problem.keys_FN.to(dtype), kp = earlier_FP.to(dtype);
  const at::Tensor system = p.mm(k.mm(k.t()) + kp.mm(kp.t())) + at::eye(kWidth, k.options()) * l2;
  return at::linalg_solve(system, p.mm(k).mm(problem.residual_DN.to(dtype).t())).t();
}

TEST(AlphaEdit, LowRankAndDenseEqualThePublishedForm) {
  const auto model = testing::tiny_model();
  const LayerProblem problem = made_up(model);
  const at::Tensor earlier = random_matrix(kWidth, 9, 20).to(at::kFloat).to(at::kDouble);
  for (const double threshold : {0.6, 1.0, 2.0, 50.0}) {  // few, half, most and all directions kept
    const std::string yaml = values("nullspace_threshold: " + std::to_string(threshold) + "\nL2: 2\n");
    const auto editor = make("alphaedit", yaml, model);
    EXPECT_LT(
        relative_difference(solved(*editor, problem), published_alphaedit(problem, at::zeros({kWidth, 0}, at::kDouble),
                                                                          threshold, 2, at::kDouble)),
        1e-10);
    const at::Tensor expected = published_alphaedit(problem, earlier, threshold, 2, at::kDouble);
    editor->load_state({{"keys.0", earlier}});
    EXPECT_LT(relative_difference(solved(*editor, problem), expected), 1e-10) << "keys, threshold " << threshold;
    editor->load_state({{"sum.0", earlier.mm(earlier.t())}});
    EXPECT_LT(relative_difference(solved(*editor, problem), expected), 1e-10) << "sum, threshold " << threshold;
    LayerProblem single = problem;
    single.keys_FN = problem.keys_FN.to(at::kFloat);
    single.residual_DN = problem.residual_DN.to(at::kFloat);
    single.dtype = at::kFloat;
    EXPECT_LT(relative_difference(solved(*editor, single), expected), 1e-5) << "float32, threshold " << threshold;
  }
}

TEST(AlphaEdit, ChangesNothingOutsideTheNullSpace) {
  const auto model = testing::tiny_model();
  const LayerProblem problem = made_up(model);
  const auto [values, vectors] = at::linalg_eigh(problem.moment.cov_FF());
  const at::Tensor used = vectors.index_select(1, values.ge(1).nonzero().squeeze(1));
  ASSERT_GT(used.size(1), 0);
  const at::Tensor delta = solved(*make("alphaedit", kAlphaEdit, model), problem);
  EXPECT_LT(delta.mm(used).norm().item<double>(), 1e-12 * delta.norm().item<double>());
}

TEST(AlphaEdit, RefusesAThresholdThatLeavesNothing) {
  const auto model = testing::tiny_model();
  try {
    (void)solved(*make("alphaedit", values("nullspace_threshold: 1e-9\n"), model), made_up(model));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.error_class(), ErrorClass::kNumeric);
    EXPECT_NE(std::string(error.what()).find("nullspace_threshold"), std::string::npos);
  }
  EXPECT_THROW((void)make("alphaedit", values("mom2_adjustment: false\n"), model), Error);
}

TEST(NullSpace, ProjectorIsOne) {
  const editors::SecondMoment moment(random_spd(kWidth, 7));
  for (const double threshold : {0.6, 1.0, 2.0}) {
    const auto space = editors::NullSpace::of(moment, threshold, moment.cov_FF());
    const at::Tensor p = space.matrix_FF();
    EXPECT_LT(relative_difference(p.mm(p), p), 1e-12);
    EXPECT_LT(relative_difference(p.t(), p), 1e-12);
    EXPECT_NEAR(p.trace().item<double>(), static_cast<double>(space.rank()), 1e-9);
    const at::Tensor s = random_spd(kWidth, 9);
    EXPECT_LT(relative_difference(space.project_both(s), p.mm(s).mm(p)), 1e-12);
  }
}

TEST(MemitSeq, WithoutEarlierKeysIsMemit) {
  const auto model = testing::tiny_model();
  const LayerProblem problem = made_up(model);
  const auto editor = make("memit-seq", kMemit, model);
  const at::Tensor memit = solved(*make("memit", kMemit, model), problem);
  EXPECT_TRUE(at::equal(solved(*editor, problem), memit));
  editor->load_state({{"keys.0", random_matrix(kWidth, 4, 3)}});
  EXPECT_GT(relative_difference(solved(*editor, problem), memit), 1e-3);
  editor->reset();
  EXPECT_TRUE(at::equal(solved(*editor, problem), memit));
}

TEST(MemitSeq, EarlierKeysJoinTheSecondMoment) {
  const auto model = testing::tiny_model();
  const LayerProblem problem = made_up(model);
  const at::Tensor earlier = random_matrix(kWidth, 9, 20).to(at::kFloat).to(at::kDouble);
  const auto editor = make("memit-seq", kMemit, model);
  editor->load_state({{"keys.0", earlier}});
  const at::Tensor& k = problem.keys_FN;
  const at::Tensor system = problem.moment.cov_FF() * 3 + earlier.mm(earlier.t()) + k.mm(k.t());
  const at::Tensor expected = problem.residual_DN.mm(at::linalg_solve(system, k).t());
  EXPECT_LT(relative_difference(solved(*editor, problem), expected), 1e-10);
  editor->load_state({{"sum.0", earlier.mm(earlier.t())}});
  EXPECT_LT(relative_difference(solved(*editor, problem), expected), 1e-10);
}

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
    EXPECT_TRUE(cache.empty());
  }
}

TEST(Rect, WritesTheLargestRelativeChanges) {
  const auto model = testing::tiny_model();
  const LayerProblem problem = made_up(model);
  for (const double percent : {100.0, 40.0, 5.0}) {
    const auto editor = make("rect", kMemit + "k_percent: " + std::to_string(percent) + "\n", model);
    const auto& rect = dynamic_cast<const LocateEditor&>(*editor);
    const auto update = rect.update(problem);
    const at::Tensor full = update.delta.matrix();
    const at::Tensor written = rect.recipe().settle(problem.site, update.delta, problem.weight_DF).matrix();
    const at::Tensor mask = written.ne(0);
    EXPECT_NEAR(100 * mask.to(at::kDouble).mean().item<double>(), percent, 0.15);  // the reference keeps one more
    EXPECT_TRUE(at::equal(written, full * mask.to(at::kDouble)));
    const at::Tensor change = (full / problem.weight_DF.to(at::kDouble)).abs();
    if (percent < 100) {
      EXPECT_GE(change.masked_select(mask).min().item<double>() * (1 + 1e-6),
                change.masked_select(mask.logical_not()).max().item<double>());
    }
  }
}

TEST(Sphere, WeakensThePrincipalDirectionsOnly) {
  const auto model = testing::tiny_model();
  const LayerProblem problem = made_up(model);
  const at::Tensor plain = solved(*make("alphaedit", kAlphaEdit, model), problem);
  const auto settled = [&](const std::string& more) {
    const auto editor = make("sphere", kAlphaEdit + more, model);
    const auto& sphere = dynamic_cast<const LocateEditor&>(*editor);
    const auto update = sphere.update(problem);
    return sphere.recipe().settle ? sphere.recipe().settle(problem.site, update.delta, problem.weight_DF).matrix()
                                  : update.delta.matrix();
  };
  EXPECT_TRUE(at::equal(settled("suppression_strength: 0\n"), plain));
  EXPECT_TRUE(at::equal(settled("cumulative_ratio: 0\n"), plain));
  // By the definition: eigenvectors of ŴᵀŴ/D.
  const at::Tensor w = problem.weight_DF.to(at::kDouble), rows = w / w.norm(2, 1, true);
  const auto [values, vectors] = at::linalg_eigh(rows.t().mm(rows) / kHidden);
  const at::Tensor share = values.flip(0).cumsum(0) / values.sum();
  const int64_t count = share.le(0.4).sum().item<int64_t>() + 1;
  const at::Tensor u = vectors.narrow(1, kWidth - count, count);
  EXPECT_LT(relative_difference(settled("cumulative_ratio: 0.4\nsuppression_strength: 0.3\n"),
                                plain - plain.mm(u).mm(u.t()) * 0.3),
            1e-9);
}

TEST(Nse, WritesOnlyInfluentialNeurons) {
  const auto model = testing::tiny_model();
  const LayerProblem problem = made_up(model);
  EXPECT_TRUE(at::equal(solved(*make("nse", kMemit + "neuron_threshold: 1\n", model), problem),
                        solved(*make("memit", kMemit, model), problem)));
  const at::Tensor delta = solved(*make("nse", kMemit + "neuron_threshold: 0.5\n", model), problem);
  const at::Tensor written = delta.abs().sum(0).ne(0), scores = problem.keys_FN.abs().sum(1);
  const double share = scores.masked_select(written).sum().item<double>() / scores.sum().item<double>();
  EXPECT_LE(share, 0.5);
  EXPECT_GT(share + scores.masked_select(written.logical_not()).max().item<double>() / scores.sum().item<double>(),
            0.5);
  // On the written neurons it is the system of those neurons alone.
  const at::Tensor index = written.nonzero().squeeze(1), k = problem.keys_FN.index_select(0, index);
  const at::Tensor cov = problem.moment.cov_FF().index_select(0, index).index_select(1, index);
  const at::Tensor expected = problem.residual_DN.mm(at::linalg_solve(cov * 3 + k.mm(k.t()), k).t());
  EXPECT_LT(relative_difference(delta.index_select(1, index), expected), 1e-10);
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
  auto model = testing::tiny_model();
  auto statistics = testing::tiny_statistics(model);
  editors::EditContext context;
  context.contexts = testing::tiny_contexts();
  context.statistics = &statistics;
  auto editor = make(name, yaml, model);
  auto facts = first_batch();
  if (reversed) std::reverse(facts.begin(), facts.end());
  (void)editor->edit(model, facts, context);
  if (between) between(editor, model);
  (void)editor->edit(model, second_batch(), context);
  (void)editor->finish(model, context);
  return testing::all_weights(model);
}

const std::vector<std::pair<std::string, std::string>> kSequential = {{"alphaedit", kAlphaEdit}, {"sphere", kAlphaEdit},
                                                                      {"memit-seq", kMemit},     {"nse", kMemit},
                                                                      {"rect", kMemit},          {"prune", kMemit}};

TEST(SequentialEditors, ANewInstanceWithTheStateGoesOn) {
  for (const auto& [name, yaml] : kSequential) {
    const auto straight = edit_twice(name, yaml, {});
    const auto resumed =
        edit_twice(name, yaml, [&, &n = name, &y = yaml](std::unique_ptr<Editor>& editor, models::Model& model) {
          const auto state = editor->state();
          editor = make(n, y, model);
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
    for (const auto& [weight, value] : straight)
      EXPECT_LT(relative_difference(reversed.at(weight), value), 1e-6) << name << ' ' << weight;
  }
}

TEST(SequentialEditors, ABatchThatFailsLeavesTheMemoryAsItWas) {
  for (const auto& method : kSequential) {
    const std::string& name = method.first;
    auto model = testing::tiny_model();
    auto statistics = testing::tiny_statistics(model);
    editors::EditContext context;
    context.contexts = testing::tiny_contexts();
    context.statistics = &statistics;
    auto editor = make(name, method.second, model);
    const auto fails = [&] {
      const auto before = testing::all_weights(model);
      const auto state = editor->state();
      context.progress = [](const ProgressUpdate& progress) {
        if (progress.phase == "insert" && progress.done >= 1)
          throw Error(ErrorClass::kCancelled, {"test", "stop", "", ""});
      };
      EXPECT_THROW((void)editor->edit(model, first_batch(), context), Error) << name;
      context.progress = {};
      EXPECT_TRUE(testing::changed_weights(model, before).empty()) << name;
      const auto after = editor->state();
      ASSERT_EQ(after.size(), state.size()) << name;
      for (const auto& [key, value] : state) EXPECT_TRUE(at::equal(after.at(key), value)) << name << ' ' << key;
    };
    fails();
    (void)editor->edit(model, second_batch(), context);
    fails();
  }
}

// The singular values of ΔW after finish() are the paper's, whatever was written.
TEST(Prune, RestrainsTheSumOfAllChanges) {
  for (const char* family : {"llama", "gpt2"}) {
    auto model = testing::tiny_model({.family = family});
    auto statistics = testing::tiny_statistics(model);
    editors::EditContext context;
    context.contexts = testing::tiny_contexts();
    context.statistics = &statistics;
    const auto editor = make("prune", kMemit + "restraint_base: 50\n", model);
    const std::string weight = model.edit_site(1).weight_name;
    const at::Tensor original = model.weight(weight).detach().clone();
    (void)editor->edit(model, first_batch(), context);
    const double limit = at::linalg_svdvals(original.to(at::kDouble)).max().item<double>();
    // Two directions far above the limit, one below.
    const at::Tensor u = std::get<0>(at::linalg_qr(random_matrix(original.size(0), 3, 1)));
    const at::Tensor v = std::get<0>(at::linalg_qr(random_matrix(original.size(1), 3, 2)));
    const at::Tensor sizes = at::tensor({40 * limit, 7 * limit, 0.5 * limit}, at::kDouble);
    model.set_weight(weight, (original.to(at::kDouble) + (u * sizes).mm(v.t())).to(at::kFloat));
    const at::Tensor untouched = model.weight(model.edit_site(2).weight_name).detach().clone();

    const auto result = editor->finish(model, context);
    ASSERT_TRUE(result.has_value()) << family;
    EXPECT_EQ(result->deltas.size(), 1U) << "a layer without large values was written";
    EXPECT_TRUE(at::equal(model.weight(model.edit_site(2).weight_name), untouched));
    const at::Tensor got = at::linalg_svdvals((model.weight(weight) - original).to(at::kDouble)).narrow(0, 0, 3);
    const auto restrained = [&](double factor) { return std::log(factor) / std::log(50.0) + limit; };
    EXPECT_LT(relative_difference(got, at::tensor({std::min(restrained(40), 40 * limit),
                                                   std::min(restrained(7), 7 * limit), 0.5 * limit})),
              1e-4)
        << family << " " << got << " limit " << limit;
    const double bound = limit + std::min(restrained(40), 40 * limit);
    EXPECT_LE(at::linalg_svdvals(model.weight(weight).to(at::kDouble)).max().item<double>(), bound * (1 + 1e-6));
  }
}

TEST(Prune, DoesNothingBelowTheLimit) {
  auto model = testing::tiny_model();
  auto statistics = testing::tiny_statistics(model);
  editors::EditContext context;
  context.contexts = testing::tiny_contexts();
  context.statistics = &statistics;
  const auto editor = make("prune", values("mom2_update_weight: 1000\n"), model);
  EXPECT_FALSE(editor->finish(model, context).has_value()) << "before any batch";
  (void)editor->edit(model, first_batch(), context);
  const auto before = testing::all_weights(model);
  EXPECT_FALSE(editor->finish(model, context).has_value());
  EXPECT_TRUE(testing::changed_weights(model, before).empty());
}

// Facts whose residual is small enough sit the second pass out, far ones are refused.
TEST(Nse, LimitsOfTheResidualDecideWhoIsWritten) {
  const auto run = [](const std::string& more) {
    auto model = testing::tiny_model();
    auto statistics = testing::tiny_statistics(model);
    editors::EditContext context;
    context.contexts = testing::tiny_contexts();
    context.statistics = &statistics;
    return make("nse", kMemit + more, model)->edit(model, first_batch(), context);
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
