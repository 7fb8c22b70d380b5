// The sites inside a block, of every debug flavour of every family.
#include <limits>

#include "support/family_suite.h"
#include "support/spread_plan.h"

namespace emend::models {
namespace inner_sites_test {

using hooks::HookSession;
using hooks::Site;
using hooks::SiteRef;
using testing::FamilyFlavour;
using testing::FamilySuite;

class InnerSites : public ::testing::TestWithParam<FamilyFlavour> {};

TEST_P(InnerSites, AgreeWithArithmeticWrittenOut) {
  FamilySuite(GetParam(), {}).inner_sites_agree(1e-4);
}

TEST_P(InnerSites, EqualTheWholeTextWithACache) {
  FamilySuite suite(GetParam(), {});
  // Qwen's log n scaling counts columns, its base what the prompt was: a prompt in pieces is tested by the fixtures.
  suite.inner_sites_equal_with_a_cache(1e-4);
}

TEST_P(InnerSites, AreBitForBitTheSameOnThreeDevices) {
  FamilySuite split(GetParam(), testing::spread_plan), whole(GetParam(), {});
  const at::NoGradGuard no_grad;
  const auto batch = TokenBatch::from_rows(testing::suite_rows());
  const auto here = whole.captures(batch);
  for (const auto& [ref, value] : split.captures(batch)) EXPECT_TRUE(at::equal(value, here.at(ref))) << to_string(ref);
}

TEST_P(InnerSites, LookingChangesNothing) {
  FamilySuite suite(GetParam(), {});
  const at::NoGradGuard no_grad;
  const auto batch = TokenBatch::from_rows(testing::suite_rows());
  const at::Tensor plain = suite.logits(batch);
  std::map<SiteRef, at::Tensor> copies, references;
  for (const bool reference : {false, true}) {
    HookSession session(suite.model().hooks());
    for (const Site site : hooks::all_sites())
      if (suite.model().has_site(site) && site != Site::kAttnScores && site != Site::kAttnPattern &&
          hooks::is_layer_site(site))
        session.capture({site, 1}, {.reference = reference, .tokens = {}});
    session.attach();
    EXPECT_TRUE(at::equal(suite.logits(batch), plain));
    for (const Site site : hooks::all_sites())
      if (suite.model().has_site(site) && site != Site::kAttnScores && site != Site::kAttnPattern &&
          hooks::is_layer_site(site))
        (reference ? references : copies)[{site, 1}] = session.captured({site, 1});
    session.finish();
  }
  for (const auto& [ref, value] : copies)
    EXPECT_TRUE(at::equal(value, references.at(ref))) << to_string(ref) << " was written over";
  (void)suite.captures(batch);  // scores and patterns too: attention written out rounds differently
  EXPECT_TRUE(at::equal(suite.logits(batch), plain)) << "something of the hooks stayed";
}

TEST_P(InnerSites, AnEditOfThePatternOrOfAHeadTakesEffect) {
  FamilySuite suite(GetParam(), {});
  const at::NoGradGuard no_grad;
  const auto batch = TokenBatch::from_rows(testing::suite_rows());
  for (const Site site : {Site::kAttnPattern, Site::kAttnZ}) {
    HookSession session(suite.model().hooks());
    session.edit({site, 1}, [](const at::Tensor& x) { return at::zeros_like(x); });
    session.capture({Site::kAttnZ, 1}).capture({Site::kAttnOut, 1}).attach();
    (void)suite.logits(batch);
    const at::Tensor out = session.captured({Site::kAttnOut, 1});
    EXPECT_EQ(session.captured({Site::kAttnZ, 1}).abs().max().item<double>(), 0);
    EXPECT_EQ((out - out[0]).abs().max().item<double>(), 0) << "only the bias is left";
    session.finish();
  }
}

TEST_P(InnerSites, PaddingThatIsKeptShowsTheSame) {
  FamilySuite suite(GetParam(), {});
  const at::NoGradGuard no_grad;
  at::Tensor ids = at::zeros({2, 6}, at::kLong), mask = at::zeros({2, 6}, at::kLong);
  for (int64_t t = 0; t < 6; ++t) ids[0][t] = 3 + t, mask[0][t] = 1;
  for (int64_t t = 0; t < 3; ++t) ids[1][t] = 20 + t, mask[1][t] = 1;
  const auto packed = TokenBatch::from_padded(ids, mask), padded = TokenBatch::from_padded(ids, mask, {}, true);
  std::vector<int64_t> real;
  for (int64_t n = 0; n < padded.tokens(); ++n)
    if (!padded.is_padding()[n]) real.push_back(n);
  const auto wanted = suite.captures(packed);
  for (const auto& [ref, value] : suite.captures(padded)) {
    if (ref.site == Site::kAttnScores) continue;
    const at::Tensor mine = value.index_select(0, at::tensor(real, at::kLong));
    EXPECT_LE((mine - wanted.at(ref)).abs().max().item<double>(), 2e-5) << to_string(ref);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, InnerSites, ::testing::ValuesIn(testing::all_flavours()), testing::flavour_name);

}  // namespace inner_sites_test
}  // namespace emend::models
