// Routing between the CPU and the "meta" device, which is always there; sim_route_test does it with real
// data.
#include <ATen/ATen.h>
#include <emend/devices/route.h>
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

namespace emend::devices {
namespace route_test {

at::Tensor on_meta() {
  return at::empty({1}, at::TensorOptions().device(c10::kMeta));
}

TEST(Route, ReturnsTheSameTensorWhenNothingChanges) {
  TransferScope scope;
  const auto x = at::ones({3}), y = at::zeros({7}, at::kDouble);
  EXPECT_TRUE(route_like(x, y, Purpose::kHidden).is_same(x));
  EXPECT_TRUE(to_host(x).is_same(x));
  EXPECT_TRUE(route_to(x, c10::Device(c10::kCPU), Purpose::kOther).is_same(x));
  EXPECT_FALSE(route_like(at::Tensor(), y, Purpose::kTable).defined());
  EXPECT_EQ(scope.total().count, 0);
}

TEST(Route, MatchesDtypeOnlyOnRequest) {
  TransferScope scope;
  const auto x = at::ones({3}), y = at::zeros({7}, at::kDouble);
  const auto z = route_like(x, y, Purpose::kDelta, Dtype::kMatch);
  EXPECT_EQ(z.scalar_type(), at::kDouble);
  EXPECT_EQ(scope.total().count, 0) << "a change of dtype is no transfer";
}

TEST(Route, CountsBytesByPairAndPurpose) {
  TransferScope outer;
  const auto x = at::ones({4, 8});
  const auto moved = route_like(x, on_meta(), Purpose::kHidden);
  EXPECT_EQ(moved.device().type(), c10::kMeta);
  {
    TransferScope inner;
    (void)route_like(x.slice(0, 0, 1), on_meta(), Purpose::kHidden);
    (void)route_like(x, on_meta(), Purpose::kLabels);
    EXPECT_EQ(inner.total().count, 2);
    EXPECT_EQ(inner.total(Purpose::kHidden).bytes, 32);
  }
  EXPECT_EQ(outer.total(Purpose::kHidden).count, 2);
  EXPECT_EQ(outer.total(Purpose::kHidden).bytes, 128 + 32);
  EXPECT_EQ(outer.total(Purpose::kHidden).largest, 128);
  EXPECT_EQ(outer.total(Purpose::kLabels).bytes, 128);
  const auto json = outer.to_json();
  ASSERT_EQ(json.size(), 2U);
  EXPECT_EQ(json[0]["from"], "cpu");
  EXPECT_EQ(json[0]["to"], "meta");
  EXPECT_EQ(json[0]["purpose"], "hidden");
}

TEST(Route, TheNarrowerTypeCrosses) {
  TransferScope scope;
  const auto wide = at::ones({16}, at::kDouble);
  const auto narrow = route_like(wide, on_meta(), Purpose::kDelta, Dtype::kMatch);
  EXPECT_EQ(narrow.scalar_type(), at::kFloat);
  EXPECT_EQ(scope.total().bytes, 64);
}

TEST(Route, UndefinedDestinationIsAMistake) {
  EXPECT_THROW((void)route_like(at::ones({1}), at::Tensor(), Purpose::kHidden), std::logic_error);
}

TEST(Route, EveryPurposeHasADistinctName) {
  std::vector<std::string_view> names;
  for (int p = 0; p <= static_cast<int>(Purpose::kOther); ++p) names.push_back(to_string(static_cast<Purpose>(p)));
  EXPECT_EQ(names.back(), "other");
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::unique(names.begin(), names.end()), names.end());
}

TEST(Route, SameDeviceCostsNextToNothing) {
  const auto x = at::ones({8}), y = at::ones({8});
  constexpr int kCalls = 1'000'000;
  int64_t defined = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) defined += route_like(x, y, Purpose::kHidden, Dtype::kMatch).defined();
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  std::cout << "route on the same device: " << took.count() / kCalls << " ns\n";
  EXPECT_EQ(defined, kCalls);
  EXPECT_LT(took.count() / kCalls, 1000) << "an elementwise operator on a tiny tensor takes about that long";
}

}  // namespace route_test
}  // namespace emend::devices
