#include <ATen/ATen.h>
#include <emend/hooks/hook_session.h>
#include <gtest/gtest.h>

#include "support/error_of.h"

namespace emend::hooks {
namespace hook_test {

const SiteRef kKey{Site::kMlpDownIn, 1};

std::string message_of(const std::function<void()>& action) {
  return testing::error_of(action, ErrorClass::kInvalidArgument);
}

TEST(Site, NamesRoundTrip) {
  for (const Site site : all_sites()) {
    const SiteRef ref{site, is_layer_site(site) ? 12 : -1};
    EXPECT_EQ(parse_site(to_string(ref)), ref) << to_string(ref);
  }
  EXPECT_EQ(to_string(kKey), "layers.1.mlp_down_in");
  EXPECT_EQ(to_string({Site::kFinalNorm}), "final_norm");
}

TEST(Site, RefusesWhatIsNotASite) {
  for (const char* text : {"", "layers", "layers.", "layers.1", "layers.1.", "layers.x.mlp_in", "layers.-1.mlp_in",
                           "mlp_in", "layers.1.embedding", "layers.99999999999.mlp_in", "layers.1.mlp_in.", "logits "})
    EXPECT_THROW((void)parse_site(text), Error) << text;
  EXPECT_NE(message_of([] { (void)parse_site("layers.0.mlp_don_in"); }).find("did you mean \"layers.0.mlp_down_in\"?"),
            std::string::npos);
}

TEST(HookPoint, RunsInOrderAndPassesReplacementsOn) {
  HookTable table(3);
  HookPoint& point = table.at(kKey);
  EXPECT_TRUE(point.idle());
  const auto twice = point.add([](const at::Tensor& x) { return x * 2; });
  at::Tensor seen;
  const auto watch = point.add([&](const at::Tensor& x) {
    seen = x;
    return at::Tensor();
  });
  const auto plus = point.add([](const at::Tensor& x) { return x + 1; });
  EXPECT_TRUE(at::equal(point(at::ones({2})), at::full({2}, 3.0)));
  EXPECT_TRUE(at::equal(seen, at::full({2}, 2.0)));
  EXPECT_TRUE(table.at({Site::kMlpDownIn, 0}).idle());
}

// As a change that a hook brings to the model's device once.
TEST(HookPoint, AFunctionKeepsItsState) {
  HookTable table(2);
  HookPoint& point = table.at(kKey);
  const auto handle = point.add([calls = 0](const at::Tensor& x) mutable { return x + ++calls; });
  (void)point(at::zeros({1}));
  EXPECT_EQ(point(at::zeros({1})).item<float>(), 2);
}

TEST(HookPoint, HandleDetaches) {
  HookTable table(2);
  HookPoint& point = table.at(kKey);
  {
    const auto handle = point.add([](const at::Tensor& x) { return x + 1; });
    EXPECT_FALSE(point.idle());
  }
  EXPECT_TRUE(point.idle());
  HookHandle moved;
  {
    HookHandle handle = point.add([](const at::Tensor& x) { return x + 1; });
    moved = std::move(handle);
  }
  EXPECT_FALSE(point.idle());
  moved.remove();
  moved.remove();
  EXPECT_TRUE(point.idle());
}

TEST(HookPoint, HandleMayOutliveTheTable) {
  HookHandle handle;
  {
    HookTable table(2);
    handle = table.at(kKey).add([](const at::Tensor&) { return at::Tensor(); });
  }
  handle.remove();
}

TEST(HookPoint, MayDetachItselfWhileRunning) {
  HookTable table(2);
  HookPoint& point = table.at(kKey);
  HookHandle handle;
  int calls = 0;
  handle = point.add([&](const at::Tensor&) {
    ++calls;
    handle.remove();
    return at::Tensor();
  });
  (void)point(at::ones({1}));
  (void)point(at::ones({1}));
  EXPECT_EQ(calls, 1);
}

TEST(HookPoint, RefusesAReplacementOfAnotherKind) {
  HookTable table(2);
  HookPoint& point = table.at(kKey);
  for (const at::Tensor& wrong : {at::ones({3}), at::ones({2}, at::kDouble), at::ones({1, 2})}) {
    const auto handle = point.add([&](const at::Tensor&) { return wrong; });
    const std::string text = message_of([&] { (void)point(at::ones({2})); });
    EXPECT_NE(text.find("layers.1.mlp_down_in"), std::string::npos) << text;
  }
}

TEST(HookTable, KnowsItsLayers) {
  HookTable table(2);
  EXPECT_THROW((void)table.at({Site::kLayerIn, 2}), Error);
  EXPECT_THROW((void)table.at({Site::kLayerIn, -1}), Error);
  EXPECT_THROW((void)table.at({Site::kLogits, 0}), Error);
  for (const Site site : all_sites())
    for (int layer = is_layer_site(site) ? 0 : -1; layer < (is_layer_site(site) ? 2 : 0); ++layer) {
      EXPECT_EQ(table.at({site, layer}).ref(), (SiteRef{site, layer}));
      EXPECT_EQ(&table.at({site, layer}), &table.point(site, layer));
    }
}

TEST(HookSession, CapturesCopiesUnlessAReferenceIsAskedFor) {
  HookTable table(2);
  const HookPoint& point = table.at(kKey);
  HookSession session(table);
  session.capture(kKey).attach();
  at::Tensor x = at::ones({3, 2});
  (void)point(x);
  x.zero_();
  EXPECT_TRUE(at::equal(session.captured(kKey), at::ones({3, 2})));
  session.finish();

  HookSession by_reference(table);
  by_reference.capture(kKey, {.reference = true, .tokens = std::nullopt}).attach();
  at::Tensor y = at::ones({3, 2}).requires_grad_(true);
  (void)point(y * 2);
  EXPECT_TRUE(by_reference.captured(kKey).requires_grad());
  by_reference.finish();
}

TEST(HookSession, CapturesChosenTokensInTheirOrder) {
  HookTable table(2);
  HookSession session(table);
  session.capture(kKey, {.reference = false, .tokens = std::vector<int64_t>{2, 0, 2}}).attach();
  (void)table.at(kKey)(at::arange(6, at::kFloat).view({3, 2}));
  EXPECT_TRUE(at::equal(session.captured(kKey), at::tensor({4.f, 5.f, 0.f, 1.f, 4.f, 5.f}).view({3, 2})));
  session.finish();

  HookSession wrong(table);
  wrong.capture(kKey, {.reference = false, .tokens = std::vector<int64_t>{3}}).attach();
  EXPECT_THROW((void)table.at(kKey)(at::ones({3, 2})), Error);
}

TEST(HookSession, StopsAfterCapturesAndEditsAtTheSite) {
  HookTable table(2);
  HookSession session(table);
  session.stop_after(kKey).edit(kKey, [](const at::Tensor& x) { return x + 1; }).capture(kKey).attach();
  EXPECT_THROW((void)table.at(kKey)(at::zeros({1, 2})), StopForward);
  EXPECT_TRUE(at::equal(session.captured(kKey), at::ones({1, 2})));
  session.finish();
}

TEST(HookSession, ResolvesAllSitesBeforeAttachingAny) {
  HookTable table(2);
  HookSession session(table);
  session.capture(kKey).capture({Site::kMlpDownIn, 7});
  EXPECT_THROW(session.attach(), Error);
  EXPECT_TRUE(table.at(kKey).idle());
}

TEST(HookSession, SilenceIsAFailure) {
  HookTable table(2);
  HookSession session(table);
  session.capture(kKey).edit({Site::kLogits}, [](const at::Tensor&) { return at::Tensor(); }).attach();
  (void)table.at(kKey)(at::zeros({1, 2}));
  const std::string text = message_of([&] { session.finish(); });
  EXPECT_NE(text.find("edit at logits"), std::string::npos) << text;
  EXPECT_EQ(text.find("mlp_down_in"), std::string::npos) << text;
  EXPECT_TRUE(table.at({Site::kLogits}).idle());
  EXPECT_NE(message_of([&] { (void)session.captured({Site::kLogits}); }).find("does not capture"), std::string::npos);
}

TEST(HookSession, DetachesHoweverTheScopeEnds) {
  HookTable table(2);
  try {
    HookSession session(table);
    session.edit(kKey, [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("inside"); }).attach();
    (void)table.at(kKey)(at::zeros({1}));
    FAIL();
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(table.at(kKey).idle());
  HookSession twice(table);
  twice.capture(kKey).attach();
  EXPECT_THROW(twice.attach(), Error);
  EXPECT_THROW(twice.capture(kKey), Error);
}

}  // namespace hook_test
}  // namespace emend::hooks
