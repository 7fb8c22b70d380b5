#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/editors/steps/locate.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "support/editor_models.h"
#include "support/error_of.h"

namespace emend {
namespace apply_test {

using editors::apply_delta;
using editors::EditTransaction;
using editors::WeightDelta;
using testing::all_weights;
using testing::changed_weights;
using testing::random_matrix;
using testing::relative_difference;
using testing::tiny_model;

WeightDelta some_delta(const models::Model& model, int layer, uint64_t seed = 1, double scale = 0.01) {
  const auto site = model.edit_site(layer);
  return WeightDelta::factors(site, random_matrix(site.out_features, 3, seed) * scale,
                              random_matrix(site.in_features, 3, seed + 1));
}

// The weight in paper orientation.
at::Tensor paper(const models::Model& model, int layer) {
  return editors::oriented(model, model.edit_site(layer)).detach().clone();
}

TEST(Apply, AddsInPaperOrientationWhateverIsStored) {
  for (const char* family : {"llama", "gpt2"}) {
    models::Model model = tiny_model({.family = family});
    const auto site = model.edit_site(2);
    EXPECT_EQ(site.orientation == models::Orientation::kInOut, std::string(family) == "gpt2");
    const WeightDelta delta = some_delta(model, 2);
    const at::Tensor before = paper(model, 2);
    EditTransaction transaction(model);
    const auto report = apply_delta(delta, transaction);
    EXPECT_LT((paper(model, 2).to(at::kDouble) - (before.to(at::kDouble) + delta.matrix())).abs().max().item<double>(),
              1e-6)
        << family;
    EXPECT_NEAR(report.delta_norm, delta.norm(), 1e-9);
    EXPECT_NEAR(report.weight_norm, before.norm().item<double>(), 1e-4);
    EXPECT_NEAR(report.survived, 1, 1e-4);
    // The key acts on it: m = (W + ΔW)k.
    const at::Tensor key = random_matrix(site.in_features, 1, 9);
    EXPECT_LT(relative_difference(paper(model, 2).to(at::kDouble).mm(key) - before.to(at::kDouble).mm(key),
                                  delta.matrix().mm(key)),
              1e-4);
  }
}

TEST(Apply, FactorsAndDenseWriteTheSameBytes) {
  models::Model factored = tiny_model(), dense = tiny_model();
  const WeightDelta delta = some_delta(factored, 1);
  EditTransaction a(factored), b(dense);
  (void)apply_delta(delta, a);
  (void)apply_delta(WeightDelta::dense(dense.edit_site(1), delta.matrix()), b);
  EXPECT_TRUE(at::equal(paper(factored, 1), paper(dense, 1)));
}

TEST(Apply, AddsInDoubleAndRoundsOnce) {
  models::Model model = tiny_model();
  const auto site = model.edit_site(0);
  const at::Tensor before = paper(model, 0);
  // Parts that a float32 delta would lose before the sum is made.
  const at::Tensor delta = random_matrix(site.out_features, site.in_features, 4);
  EditTransaction transaction(model);
  (void)apply_delta(WeightDelta::dense(site, delta), transaction);
  EXPECT_TRUE(at::equal(paper(model, 0), (before.to(at::kDouble) + delta).to(at::kFloat)));
}

TEST(Apply, ReportsWhatHalfPrecisionSwallows) {
  models::Model model = tiny_model({.dtype = at::kBFloat16});
  EditTransaction transaction(model);
  const auto small = apply_delta(some_delta(model, 1, 1, 1e-5), transaction);
  EXPECT_LT(small.survived, 0.9);
  const auto large = apply_delta(some_delta(model, 2, 1, 1), transaction);
  EXPECT_GT(large.survived, 0.99);
}

TEST(Apply, OneDimensionalWeights) {
  models::Model model = tiny_model({.family = "gpt2"});
  const std::string bias = model.edit_site(1).bias_name;
  ASSERT_FALSE(bias.empty());
  const at::Tensor before = model.weight(bias).detach().clone(), change = at::ones({32}, at::kDouble);
  EditTransaction transaction(model);
  (void)apply_delta(WeightDelta::as_stored(bias, 1, change), transaction);
  EXPECT_TRUE(at::allclose(model.weight(bias), before + 1));
}

TEST(Apply, RefusesWhatCannotBeRight) {
  models::Model model = tiny_model();
  const auto before = all_weights(model);
  EditTransaction transaction(model);
  WeightDelta other = some_delta(model, 1);
  other.right_FR = random_matrix(47, 3, 1);
  EXPECT_THROW((void)apply_delta(other, transaction), Error);
  WeightDelta broken = some_delta(model, 1);
  broken.left_DR[0][0] = std::nan("");
  testing::expect_error(ErrorClass::kNumeric, {broken.weight}, [&] { (void)apply_delta(broken, transaction); });
  WeightDelta unknown = some_delta(model, 1);
  unknown.weight = "model.layers.9.mlp.down_proj.weight";
  EXPECT_THROW((void)apply_delta(unknown, transaction), Error);
  EXPECT_THROW(editors::write_weight(model.edit_site(1).weight_name, at::zeros({3, 3}), transaction), Error);
  EXPECT_TRUE(changed_weights(model, before).empty());
}

TEST(Transaction, RestoresBitForBit) {
  models::Model model = tiny_model({.dtype = at::kBFloat16});
  const auto before = all_weights(model);
  {
    EditTransaction transaction(model);
    for (int i = 0; i < 5; ++i) (void)apply_delta(some_delta(model, i % 3, static_cast<uint64_t>(i), 0.3), transaction);
    EXPECT_EQ(transaction.changed().size(), 3U);
    EXPECT_EQ(changed_weights(model, before).size(), 3U);
    transaction.restore();
    EXPECT_TRUE(changed_weights(model, before).empty());
    (void)apply_delta(some_delta(model, 1), transaction);
  }
  EXPECT_TRUE(changed_weights(model, before).empty());
}

TEST(Transaction, RestoresWhenAnExceptionPasses) {
  models::Model model = tiny_model();
  const auto before = all_weights(model);
  EXPECT_THROW(
      {
        EditTransaction transaction(model);
        (void)apply_delta(some_delta(model, 1), transaction);
        throw std::runtime_error("full disk");
      },
      std::runtime_error);
  EXPECT_TRUE(changed_weights(model, before).empty());
}

TEST(Transaction, CommitKeepsAndParentsCanStillUndo) {
  models::Model model = tiny_model();
  const auto before = all_weights(model);
  {
    EditTransaction outer(model);
    {
      EditTransaction inner(model, &outer);
      (void)apply_delta(some_delta(model, 1), inner);
      inner.commit();
    }
    EXPECT_EQ(changed_weights(model, before).size(), 1U);
    const auto after_first = all_weights(model);
    {
      EditTransaction inner(model, &outer);
      (void)apply_delta(some_delta(model, 1), inner);
      (void)apply_delta(some_delta(model, 2), inner);
    }
    EXPECT_TRUE(changed_weights(model, after_first).empty()) << "an uncommitted child leaves what was before it";
    EXPECT_EQ(outer.changed().size(), 1U);
  }
  EXPECT_TRUE(changed_weights(model, before).empty());
  EditTransaction kept(model);
  (void)apply_delta(some_delta(model, 1), kept);
  kept.commit();
  EXPECT_EQ(changed_weights(model, before).size(), 1U);
}

TEST(Transaction, TiedWeightsComeBackToo) {
  models::Model model = tiny_model();
  const auto before = all_weights(model);
  {
    EditTransaction transaction(model);
    editors::write_weight("model.embed_tokens.weight", at::zeros({257, 32}), transaction);
    EXPECT_EQ(model.weight("model.embed_tokens.weight").abs().max().item<double>(), 0);
  }
  EXPECT_TRUE(changed_weights(model, before).empty());
}

TEST(Delta, NormRankAndMerging) {
  models::Model model = tiny_model();
  const WeightDelta a = some_delta(model, 1, 1), b = some_delta(model, 2, 5), c = some_delta(model, 1, 9);
  EXPECT_NEAR(a.norm(), a.matrix().norm().item<double>(), 1e-12);
  EXPECT_EQ(a.rank(), 3);
  EXPECT_EQ(a.shape(), (std::vector<int64_t>{32, 48}));
  const auto merged = editors::merge_deltas({a, b, c});
  ASSERT_EQ(merged.size(), 2U);
  EXPECT_EQ(merged[0].rank(), 6);
  EXPECT_LT(relative_difference(merged[0].matrix(), a.matrix() + c.matrix()), 1e-12);
  // Factors that are no smaller than the matrix become one; mixed forms too.
  std::vector<WeightDelta> many;
  at::Tensor sum = at::zeros({32, 48}, at::kDouble);
  for (uint64_t i = 0; i < 15; ++i) {
    many.push_back(some_delta(model, 1, i));
    sum += many.back().matrix();
  }
  many.push_back(WeightDelta::dense(model.edit_site(1), sum));
  const auto one = editors::merge_deltas(many);
  ASSERT_EQ(one.size(), 1U);
  EXPECT_FALSE(one[0].low_rank());
  EXPECT_LT(relative_difference(one[0].matrix(), 2 * sum), 1e-12);
}

// What is in a pack's file, in the checkpoint and in the run's own undo is one copy.
TEST(Transaction, SharesItsParentsCopyOfTheSameBytes) {
  models::Model model = tiny_model();
  const auto before = all_weights(model);
  const auto site = model.edit_site(1);
  const auto copy = [&](const EditTransaction& of) { return of.originals().at(site.weight_name); };
  EditTransaction run(model);
  {
    EditTransaction batch(model, &run), fact(model, &batch);
    fact.keep(site.weight_name);
    EXPECT_TRUE(copy(batch).is_same(copy(run)) && copy(fact).is_same(copy(run)));
    (void)apply_delta(some_delta(model, 1), fact);
    fact.commit();
    batch.commit();
  }
  const at::Tensor first = model.weight(site.weight_name).clone();
  {
    EditTransaction batch(model, &run), fact(model, &batch);
    fact.keep(site.weight_name);
    EXPECT_FALSE(copy(batch).is_same(copy(run))) << "the second batch begins from other bytes than the run";
    EXPECT_TRUE(copy(fact).is_same(copy(batch)));
    (void)apply_delta(some_delta(model, 1, 7), fact);
    fact.commit();
  }
  EXPECT_TRUE(at::equal(model.weight(site.weight_name), first)) << "only the second batch is taken back";
  run.restore();
  EXPECT_TRUE(changed_weights(model, before).empty());
}

TEST(Transaction, AReferenceToOneThatHasEndedIsRefused) {
  models::Model model = tiny_model();
  editors::TransactionRef reference;
  EXPECT_EQ(static_cast<EditTransaction*>(reference), nullptr);
  {
    EditTransaction transaction(model);
    reference = &transaction;
    EXPECT_EQ(static_cast<EditTransaction*>(reference), &transaction);
  }
  EXPECT_THROW((void)static_cast<EditTransaction*>(reference), Error);
}

}  // namespace apply_test
}  // namespace emend
