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

const std::vector<std::pair<std::string, std::string>> kSequential = {
    {"alphaedit", kAlphaEdit},
    {"sphere", kAlphaEdit},
    {"memit-seq", kMemit},
    {"nse", kMemit},
    {"rect", kMemit},
    {"prune", kMemit},
    {"rlsedit", kMemit},
    {"memit-fe", kMemit},
    {"lyaplock", kMemit + "alpha: 0.5\n"},
    {"alphaedit", kAlphaEdit + "suit: 0.4\n"},
    {"rect", kMemit + "history: true\n"},
    {"prune", kMemit + "history: true\n"},
    {"memit", kMemit + "nas: true\nrevive: 0.3\nsimie: 2\n"},
    {"alphaedit", kAlphaEdit + "nas: true\nrevive: 0.3\n"}};

// With `history` the weight becomes the least-squares answer to all batches, whatever was left out so far.
TEST(Rect, HistoryAsksForWhatIsOwed) {
  const auto model = testing::tiny_model();
  LayerProblem problem = made_up(model);
  const auto editor = make("rect", kMemit + "history: true\n", model);
  const at::Tensor original = problem.weight_DF.to(at::kDouble).clone();
  const at::Tensor earlier = random_matrix(kWidth, 9, 20).to(at::kFloat).to(at::kDouble),
                   wanted = random_matrix(kHidden, 9, 21);
  for (const bool folded : {false, true}) {
    editor->load_state({{folded ? "sum.0" : "keys.0", folded ? earlier.mm(earlier.t()) : earlier},
                        {"values.0", wanted.mm(earlier.t())},
                        {"original." + problem.site.weight_name, original.to(at::kFloat)}});
    // argmin ‖W Kp − Vp‖² + ‖W K − V‖² + 3·tr((W − W0) C (W − W0)ᵀ), from two very different weights.
    for (const uint64_t seed : {30, 31}) {
      const at::Tensor now = original + random_matrix(kHidden, kWidth, seed);
      problem.weight_DF = now;
      const at::Tensor &k = problem.keys_FN, c = problem.moment.cov_FF() * 3;
      const at::Tensor value = now.mm(k) + problem.residual_DN;
      const at::Tensor system = earlier.mm(earlier.t()) + k.mm(k.t()) + c;
      const at::Tensor right = wanted.mm(earlier.t()) + value.mm(k.t()) + original.to(at::kFloat).to(at::kDouble).mm(c);
      const at::Tensor expected = at::linalg_solve(system, right.t()).t() - now;
      EXPECT_LT(relative_difference(solved(*editor, problem), expected), 1e-9) << folded << seed;
    }
  }
}

// Two batches of any sizes give the weight that one batch gives: the recursion is the least-squares answer.
TEST(RlsEdit, DoesNotDependOnHowTheFactsAreSplit) {
  const auto model = testing::tiny_model();
  LayerProblem whole = made_up(model, 1, 8);
  const auto editor = make("rlsedit", kMemit + "lambda_reg: 1.5\nmu_reg: 0.8\n", model);
  whole.keys_FN = whole.keys_FN.to(at::kFloat).to(at::kDouble);  // the precision that memory keeps
  const at::Tensor &k = whole.keys_FN, w0 = whole.weight_DF.to(at::kDouble).clone();
  const at::Tensor value = w0.mm(k) + whole.residual_DN;
  const at::Tensor system = k.mm(k.t()) + whole.moment.cov_FF() * (0.64 * 3) + at::eye(kWidth, k.options()) * 2.25;
  const at::Tensor expected = at::linalg_solve(system, k.mm(whole.residual_DN.t())).t();
  EXPECT_LT(relative_difference(solved(*editor, whole), expected), 1e-10);
  for (const int64_t first : {1, 3, 7}) {
    at::Tensor weight = w0.clone();
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>(0, first), {first, 8}}) {
      LayerProblem part = whole;
      part.weight_DF = weight;
      part.keys_FN = k.narrow(1, begin, end - begin).contiguous();
      part.residual_DN = value.narrow(1, begin, end - begin) - weight.mm(part.keys_FN);
      if (begin > 0) editor->load_state({{"keys.0", k.narrow(1, 0, begin).contiguous()}});
      weight = weight + solved(*editor, part);
    }
    EXPECT_LT(relative_difference(weight - w0, expected), 1e-9) << first;
    editor->reset();
  }
}

TEST(RlsEdit, RemembersTheKeysThatABatchWasWrittenWith) {
  auto model = testing::tiny_model();
  auto statistics = testing::tiny_statistics(model);
  editors::EditContext context;
  context.contexts = testing::tiny_contexts();
  context.statistics = &statistics;
  editors::Trace trace;
  context.trace = &trace;
  const auto rls = make("rlsedit", kMemit, model);
  (void)rls->edit(model, first_batch(), context);
  for (const std::string layer : {"1", "2"}) {
    const at::Tensor kept = rls->state().at(layer == "1" ? "keys.0" : "keys.1").to(at::kDouble);
    EXPECT_LT(relative_difference(kept, trace.at("layer." + layer + ".keys").to(at::kDouble)), 1e-6) << layer;
  }
}

TEST(Modifiers, NasBringsValuesToTheAnchor) {
  const at::Tensor initial = random_matrix(8, 1, 1).squeeze(1), delta = random_matrix(8, 1, 2).squeeze(1) * 0.3,
                   mlp = random_matrix(8, 1, 3).squeeze(1);
  const double norm = 0.9 * (mlp + delta).norm().item<double>();
  const at::Tensor moved = editors::anchored_target(initial, delta, mlp, norm) - (initial - mlp);
  EXPECT_NEAR(moved.norm().item<double>(), norm, 1e-9);
  EXPECT_LT(relative_difference(moved / norm, (mlp + delta) / (mlp + delta).norm()), 1e-9);
  EXPECT_TRUE(at::equal(editors::anchored_target(initial, delta, mlp, norm / 2), initial)) << "it has run away";
  std::vector<double> norms(40, 1.0);
  norms[7] = norms[31] = 1000;
  EXPECT_DOUBLE_EQ(editors::anchor_norm(norms), 1) << "the largest twentieth does not count";
  EXPECT_THROW((void)editors::anchor_norm({1, std::nan("")}), Error);
}

TEST(Modifiers, ReviveLeavesTheLeadingDirectionsAlone) {
  const auto model = testing::tiny_model();
  const LayerProblem problem = made_up(model);
  const auto editor = make("memit", kMemit + "revive: 0.4\n", model);
  const at::Tensor plain = solved(*make("memit", kMemit, model), problem);
  editor->load_state({{"original." + problem.site.weight_name, problem.weight_DF}});
  const at::Tensor got = solved(*editor, problem);
  const auto [u, sigma, vt] = at::linalg_svd(problem.weight_DF.to(at::kDouble), false);
  const int64_t count = (sigma.square().cumsum(0) / sigma.square().sum()).lt(0.4).sum().item<int64_t>() + 1;
  at::Tensor parts = u.t().mm(plain).mm(vt.t());  // c_ij
  const at::Tensor outside = plain - plain.mm(vt.t()).mm(vt);
  parts.narrow(0, 0, count).zero_();
  parts.narrow(1, 0, count).zero_();
  const at::Tensor lead = u.narrow(1, 0, count);
  EXPECT_LT(relative_difference(got, u.mm(parts).mm(vt) + outside - lead.mm(lead.t().mm(outside))), 1e-9);
  EXPECT_GT(relative_difference(got, plain), 1e-3);
  const auto dense = editors::WeightDelta::dense(problem.site, plain);
  const auto [left, right] = editors::leading_directions(problem.weight_DF, 0.4);
  EXPECT_LT(relative_difference(editors::without_directions(dense, left, right).matrix(), got), 1e-9);
}

TEST(Modifiers, SimieActsOnTheBatchsOwnKeys) {
  const auto model = testing::tiny_model();
  const LayerProblem problem = made_up(model);
  const at::Tensor earlier = random_matrix(kWidth, 9, 20).to(at::kFloat).to(at::kDouble), &k = problem.keys_FN;
  const at::Tensor plain = solved(*make("memit", kMemit, model), problem);
  const auto editor = make("memit", kMemit + "simie: 5\n", model);
  editor->load_state({{"keys.0", earlier}});
  const at::Tensor system = at::eye(kWidth, k.options()) * 5 + earlier.mm(earlier.t()) + k.mm(k.t());
  const at::Tensor expected = at::linalg_solve(system, k.mm(plain.mm(k).t())).t();
  EXPECT_LT(relative_difference(solved(*editor, problem), expected), 1e-9);
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
    (void)make(name, yaml, model)->edit(model, {&fact, 1}, context);
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
    // What memit-fe writes above its first layer is the difference of two float32 passes that nearly agree.
    const double limit = std::string(name) == "memit-fe" ? 5e-5 : 1e-6;
    for (const auto& [weight, value] : straight)
      EXPECT_LT(relative_difference(reversed.at(weight), value), limit) << name << ' ' << weight;
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
