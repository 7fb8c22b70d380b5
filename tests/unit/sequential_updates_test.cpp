// The methods that remember, mask or restrain: what they write of made-up keys and residuals.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/null_space.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/error_of.h"
#include "support/sequential_editors.h"

namespace emend {
namespace sequential_updates_test {

using editors::LayerProblem;
using editors::LocateEditor;
using editors::WeightDelta;
using testing::kAlphaEdit;
using testing::kHidden;
using testing::kMemit;
using testing::kWidth;
using testing::made_up;
using testing::random_matrix;
using testing::random_spd;
using testing::relative_difference;
using testing::sequential_yaml;
using testing::solved;
using testing::tiny_editor;

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
    const std::string yaml = sequential_yaml("nullspace_threshold: " + std::to_string(threshold) + "\nL2: 2\n");
    const auto editor = tiny_editor("alphaedit", yaml, model);
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
  const at::Tensor delta = solved(*tiny_editor("alphaedit", kAlphaEdit, model), problem);
  EXPECT_LT(delta.mm(used).norm().item<double>(), 1e-12 * delta.norm().item<double>());
}

TEST(AlphaEdit, RefusesAThresholdThatLeavesNothing) {
  const auto model = testing::tiny_model();
  const auto none = tiny_editor("alphaedit", sequential_yaml("nullspace_threshold: 1e-9\n"), model);
  testing::expect_parts(testing::error_of([&] { (void)solved(*none, made_up(model)); }, ErrorClass::kNumeric),
                        {"nullspace_threshold"});
  EXPECT_THROW((void)tiny_editor("alphaedit", sequential_yaml("mom2_adjustment: false\n"), model), Error);
}

TEST(NullSpace, ProjectorIsOne) {
  const editors::SecondMoment moment(random_spd(kWidth, 7));
  for (const double threshold : {0.6, 1.0, 2.0}) {
    const auto space = editors::NullSpace::of(moment, threshold, moment.cov_FF());
    const at::Tensor p = space.project(at::eye(kWidth, at::kDouble));
    EXPECT_LT(relative_difference(p.mm(p), p), 1e-12);
    EXPECT_LT(relative_difference(p.t(), p), 1e-12);
    EXPECT_NEAR(p.trace().item<double>(), at::linalg_eigvalsh(moment.cov_FF()).lt(threshold).sum().item<double>(),
                1e-9);
    const at::Tensor s = random_spd(kWidth, 9);
    EXPECT_LT(relative_difference(space.project_both(s), p.mm(s).mm(p)), 1e-12);
  }
}

TEST(MemitSeq, WithoutEarlierKeysIsMemit) {
  const auto model = testing::tiny_model();
  const LayerProblem problem = made_up(model);
  const auto editor = tiny_editor("memit-seq", kMemit, model);
  const at::Tensor memit = solved(*tiny_editor("memit", kMemit, model), problem);
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
  const auto editor = tiny_editor("memit-seq", kMemit, model);
  editor->load_state({{"keys.0", earlier}});
  const at::Tensor& k = problem.keys_FN;
  const at::Tensor system = problem.moment.cov_FF() * 3 + earlier.mm(earlier.t()) + k.mm(k.t());
  const at::Tensor expected = problem.residual_DN.mm(at::linalg_solve(system, k).t());
  EXPECT_LT(relative_difference(solved(*editor, problem), expected), 1e-10);
  editor->load_state({{"sum.0", earlier.mm(earlier.t())}});
  EXPECT_LT(relative_difference(solved(*editor, problem), expected), 1e-10);
}

TEST(Rect, WritesTheLargestRelativeChanges) {
  const auto model = testing::tiny_model();
  const LayerProblem problem = made_up(model);
  for (const double percent : {100.0, 40.0, 5.0}) {
    const auto editor = tiny_editor("rect", kMemit + "k_percent: " + std::to_string(percent) + "\n", model);
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
  const at::Tensor plain = solved(*tiny_editor("alphaedit", kAlphaEdit, model), problem);
  const auto settled = [&](const std::string& more) {
    const auto editor = tiny_editor("sphere", kAlphaEdit + more, model);
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
  // So many facts that ΔW itself is smaller than its factors.
  const auto editor = tiny_editor("sphere", kAlphaEdit + "cumulative_ratio: 0.4\nsuppression_strength: 0.3\n", model);
  const auto& settle = dynamic_cast<const LocateEditor&>(*editor).recipe().settle;
  EXPECT_LT(
      relative_difference(settle(problem.site, WeightDelta::dense(problem.site, plain), problem.weight_DF).matrix(),
                          plain - plain.mm(u).mm(u.t()) * 0.3),
      1e-9);
}

TEST(Nse, WritesOnlyInfluentialNeurons) {
  const auto model = testing::tiny_model();
  const LayerProblem problem = made_up(model);
  EXPECT_TRUE(at::equal(solved(*tiny_editor("nse", kMemit + "neuron_threshold: 1\n", model), problem),
                        solved(*tiny_editor("memit", kMemit, model), problem)));
  const at::Tensor delta = solved(*tiny_editor("nse", kMemit + "neuron_threshold: 0.5\n", model), problem);
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

// With `history` the weight becomes the least-squares answer to all batches, whatever was left out so far.
TEST(Rect, HistoryAsksForWhatIsOwed) {
  const auto model = testing::tiny_model();
  LayerProblem problem = made_up(model);
  const auto editor = tiny_editor("rect", kMemit + "history: true\n", model);
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
  const auto editor = tiny_editor("rlsedit", kMemit + "lambda_reg: 1.5\nmu_reg: 0.8\n", model);
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
  const auto editor = tiny_editor("memit", kMemit + "revive: 0.4\n", model);
  const at::Tensor plain = solved(*tiny_editor("memit", kMemit, model), problem);
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
  const at::Tensor plain = solved(*tiny_editor("memit", kMemit, model), problem);
  const auto editor = tiny_editor("memit", kMemit + "simie: 5\n", model);
  editor->load_state({{"keys.0", earlier}});
  const at::Tensor system = at::eye(kWidth, k.options()) * 5 + earlier.mm(earlier.t()) + k.mm(k.t());
  const at::Tensor expected = at::linalg_solve(system, k.mm(plain.mm(k).t())).t();
  EXPECT_LT(relative_difference(solved(*editor, problem), expected), 1e-9);
}

}  // namespace sequential_updates_test
}  // namespace emend
