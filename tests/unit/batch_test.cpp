#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/models/batch.h>
#include <emend/models/kv_cache.h>
#include <gtest/gtest.h>

#include "support/debug_models.h"

namespace emend::models {
namespace batch_test {

using Ints = std::vector<int64_t>;

at::Tensor matrix(std::initializer_list<Ints> rows) {
  std::vector<at::Tensor> all;
  for (const Ints& row : rows) all.push_back(at::tensor(row, at::kLong));
  return at::stack(all);
}

TEST(TokenBatch, PacksRows) {
  const auto batch = TokenBatch::from_rows({{5, 6, 7}, {8}, {9, 10}});
  EXPECT_EQ(batch.rows(), 3);
  EXPECT_EQ(batch.tokens(), 6);
  EXPECT_EQ(batch.longest(), 3);
  EXPECT_EQ(batch.ids(), (Ints{5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(batch.positions(), (Ints{0, 1, 2, 0, 0, 1}));
  EXPECT_EQ(batch.row_begin(), (Ints{0, 3, 4, 6}));
  EXPECT_FALSE(batch.explicit_positions());
  EXPECT_EQ(batch.token(2, 1), 5);
  EXPECT_EQ(batch.token(0, -1), 2);
  EXPECT_THROW((void)batch.token(1, 1), Error);
  EXPECT_THROW((void)batch.token(1, -2), Error);
  EXPECT_THROW((void)batch.token(3, 0), Error);
}

TEST(TokenBatch, ContinuesFromGivenPositions) {
  const auto batch = TokenBatch::continuing({{1, 2}, {3}}, {4, 0});
  EXPECT_EQ(batch.positions(), (Ints{4, 5, 0}));
  EXPECT_EQ(batch.columns(), (Ints{4, 5, 0}));
  EXPECT_TRUE(batch.explicit_positions());
  EXPECT_THROW((void)TokenBatch::continuing({{1}}, {1, 2}), Error);
  EXPECT_THROW((void)TokenBatch::continuing({{1}}, {-1}), Error);
  EXPECT_THROW((void)TokenBatch::from_rows({{1}, {}}), Error);
}

TEST(TokenBatch, ReadsPaddedMatrices) {
  const at::Tensor ids = matrix({{0, 0, 5, 6}, {7, 8, 9, 0}}), mask = matrix({{0, 0, 1, 1}, {1, 1, 1, 0}});
  const auto packed = TokenBatch::from_padded(ids, mask);
  EXPECT_EQ(packed.ids(), (Ints{5, 6, 7, 8, 9}));
  EXPECT_EQ(packed.positions(), (Ints{2, 3, 0, 1, 2}));  // columns
  const auto given = TokenBatch::from_padded(ids, mask.to(at::kBool), matrix({{0, 0, 0, 1}, {0, 1, 2, 3}}));
  EXPECT_EQ(given.positions(), (Ints{0, 1, 0, 1, 2}));
  EXPECT_EQ(given.columns(), (Ints{2, 3, 0, 1, 2}));
  const auto kept = TokenBatch::from_padded(ids, mask, {}, true);
  EXPECT_EQ(kept.tokens(), 8);
  EXPECT_EQ(kept.is_padding(), (std::vector<bool>{true, true, false, false, false, false, false, true}));
  EXPECT_THROW((void)TokenBatch::from_padded(ids, matrix({{0, 0, 0, 0}, {1, 1, 1, 0}})), Error);
  EXPECT_THROW((void)TokenBatch::from_padded(ids, matrix({{1, 1}, {1, 1}})), Error);
  EXPECT_THROW((void)TokenBatch::from_padded(ids.to(at::kFloat), mask), Error);
  EXPECT_THROW((void)TokenBatch::from_padded(ids[0], mask[0]), Error);
}

TEST(TokenBatch, Unpacks) {
  const at::Tensor ids = matrix({{0, 0, 5, 6}, {7, 8, 9, 0}}), mask = matrix({{0, 0, 1, 1}, {1, 1, 1, 0}});
  const auto batch = TokenBatch::from_padded(ids, mask);
  const at::Tensor packed = at::tensor({5.f, 6.f, 7.f, 8.f, 9.f}).unsqueeze(1);
  EXPECT_TRUE(at::equal(batch.unpack(packed).squeeze(2), ids.to(at::kFloat)));
  const auto rows = TokenBatch::from_rows({{1}, {2, 3}});
  EXPECT_TRUE(at::equal(rows.unpack(at::tensor({1.f, 2.f, 3.f})), at::tensor({1.f, 0.f, 2.f, 3.f}).view({2, 2})));
  EXPECT_THROW((void)rows.unpack(at::ones({4})), Error);
}

TEST(TokenBatch, TakesFreePositionsAndFullLengths) {
  auto batch = TokenBatch::continuing({{1, 2}, {3}}, {7, 1}, {2, 3});
  EXPECT_EQ(batch.positions(), (Ints{7, 8, 1}));
  EXPECT_EQ(batch.columns(), (Ints{2, 3, 3}));
  EXPECT_THROW((void)TokenBatch::continuing({{1, 2}}, {7}, {2, 3}), Error);
  batch.set_full_lengths({10, 4});
  EXPECT_EQ(batch.full_lengths(), (Ints{10, 4}));
  EXPECT_THROW(batch.set_full_lengths({1}), Error);
}

TEST(KvCache, SelectsTruncatesAndDrops) {
  const Model model = testing::debug_model("llama", 2);
  KvCache cache(model.n_layers());
  ForwardOptions options{.cache = &cache};
  const at::NoGradGuard no_grad;
  (void)model.forward(TokenBatch::from_rows({{1, 2, 3}, {4, 5, 6, 7, 8}}), options);
  EXPECT_EQ(cache.lengths(), (Ints{3, 5}));
  EXPECT_GT(cache.bytes(), 0);

  // A repeated row continues like its original.
  KvCache chosen = cache.select_rows({1, 0, 1});
  options.cache = &chosen;
  const at::Tensor next = model.forward(TokenBatch::continuing({{9}, {9}, {9}}, {5, 3, 5}), options).logits;
  EXPECT_TRUE(at::allclose(next[0], next[2], 0, 1e-5));
  EXPECT_FALSE(at::allclose(next[0], next[1], 0, 1e-3));
  EXPECT_EQ(chosen.lengths(), (Ints{6, 4, 6}));
  EXPECT_EQ(cache.lengths(), (Ints{3, 5}));

  // Forgetting a token and giving another one is as if it had never been.
  chosen.truncate({5, 3, 5});
  const at::Tensor again = model.forward(TokenBatch::continuing({{9}, {9}, {9}}, {5, 3, 5}), options).logits;
  EXPECT_TRUE(at::allclose(next, again, 0, 1e-6));
  EXPECT_THROW(chosen.truncate({9, 0, 0}), Error);
  EXPECT_THROW(chosen.truncate({1}), Error);
  EXPECT_THROW((void)chosen.select_rows({3}), Error);

  cache.drop_layers_below(2);
  EXPECT_FALSE(cache.complete(1));
  EXPECT_TRUE(cache.complete(2));
  options.cache = &cache;
  EXPECT_THROW((void)model.forward(TokenBatch::continuing({{9}, {9}}, {3, 5}), options), Error);
  ForwardOptions upper{.cache = &cache, .append = false};
  upper.first_layer = 2;
  upper.hidden = at::zeros({2, model.hidden_size()});
  EXPECT_TRUE(model.forward(TokenBatch::continuing({{9}, {9}}, {3, 5}), upper).logits.defined());
}

TEST(KvCache, RefusesOtherRowsAndOtherModels) {
  const Model model = testing::debug_model("llama", 2);
  KvCache cache(model.n_layers()), other(model.n_layers() + 1);
  ForwardOptions options{.cache = &other};
  const at::NoGradGuard no_grad;
  EXPECT_THROW((void)model.forward(TokenBatch::from_rows({{1}}), options), Error);
  options.cache = &cache;
  (void)model.forward(TokenBatch::from_rows({{1}, {2}}), options);
  EXPECT_THROW((void)model.forward(TokenBatch::continuing({{1}}, {1}), options), Error);
}

TEST(KvCache, GrowsPastItsCapacity) {
  const Model model = testing::debug_model("llama", 2);
  KvCache small(model.n_layers(), 1), large(model.n_layers(), 64);
  const at::NoGradGuard no_grad;
  at::Tensor last[2];
  for (int which = 0; which < 2; ++which) {
    KvCache& cache = which ? large : small;
    for (int64_t k = 0; k < 20; ++k) {
      last[which] = model.forward(TokenBatch::continuing({{k}, {k + 1}}, {k, k}), {.cache = &cache}).logits;
    }
  }
  EXPECT_TRUE(at::allclose(last[0], last[1], 0, 1e-6));
}

}  // namespace batch_test
}  // namespace emend::models
