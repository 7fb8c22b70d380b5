// One model of each family, placed in many ways over 2, 3, 4 and 8 simulated devices: every number is that of one
// device.
//
// For every placement: logits and the gradient of a delta (the edited layer goes round), 24 greedily generated tokens
// with the KV cache (more than any debug flavour's window), the cache's devices, and the transfers of the passes. Edits
// are in placement_edits_test.cpp. The number of placements is asserted in Placements.AreMoreThanFiveHundred.
#include <emend/models/config.h>
#include <emend/models/kv_cache.h>
#include <gtest/gtest.h>

#include <iostream>

#include "support/placements.h"

namespace emend {
namespace placement_suite_test {

using devices::TransferScope;
using testing::NamedPlan;
using testing::PlacedShape;

/// Passes of one family on one device, to which the others are compared.
class Runs {
 public:
  static constexpr int64_t kTokens = 24;
  explicit Runs(const std::string& family)
      : config_(testing::placed_config(family)), host_(testing::placed_model(config_)) {
    for (int l = 0; l < host_.n_layers(); ++l) passes_.push_back(testing::logits_and_delta_gradient(host_, l));
    const at::NoGradGuard no_grad;
    text_ = testing::generate_some(host_, kTokens);
  }

  const models::Model& host() const { return host_; }
  PlacedShape shape() const { return testing::placed_shape(host_.config()); }

  void expect_equal(const NamedPlan& placed, size_t number) {
    SCOPED_TRACE(placed.name + ": " + placed.plan.to_json().dump());
    const models::Model model = testing::placed_model(config_, &placed.plan);
    const int layer = static_cast<int>(number % static_cast<size_t>(model.n_layers()));
    const int64_t tokens = testing::placed_batch().tokens(), vocabulary = model.vocab_size();
    {
      const TransferScope scope;
      const auto [logits, gradient] = testing::logits_and_delta_gradient(model, layer);
      EXPECT_EQ(logits.device(), placed.plan.head);
      EXPECT_EQ(gradient.device(), c10::Device(c10::kCPU)) << "a gradient comes back to where its delta lives";
      testing::expect_small_transfers(scope, std::min(vocabulary * model.hidden_size(), tokens * vocabulary) * 4,
                                      "pass");
      expect_bits(devices::to_host(logits), passes_[static_cast<size_t>(layer)].first, "logits");
      expect_bits(gradient, passes_[static_cast<size_t>(layer)].second,
                  "gradient of the delta in layer " + std::to_string(layer));
    }
    const at::NoGradGuard no_grad;
    const TransferScope scope;
    EXPECT_EQ(testing::generate_some(model, kTokens), text_) << "tokens with a KV cache";
    EXPECT_LT(scope.total().largest, vocabulary * model.hidden_size() * 4) << "generation moved something large";
    expect_cache_at_home(model);
  }

 private:
  static void expect_bits(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
    EXPECT_TRUE(at::equal(got, expected)) << what << " differ by " << (got - expected).abs().max().item<double>();
  }
  static void expect_cache_at_home(const models::Model& model) {
    models::KvCache cache(model.n_layers());
    (void)model.forward(testing::placed_batch(), {.cache = &cache});
    for (int l = 0; l < model.n_layers(); ++l) {
      EXPECT_EQ(cache.keys(l).device(), model.placement().layers[static_cast<size_t>(l)]);
      EXPECT_EQ(cache.values(l).device(), model.placement().layers[static_cast<size_t>(l)]);
    }
  }

  nlohmann::json config_;
  models::Model host_;
  std::vector<std::pair<at::Tensor, at::Tensor>> passes_;
  std::vector<std::vector<int64_t>> text_;
};

class PlacementSuite : public ::testing::TestWithParam<std::string> {};

TEST_P(PlacementSuite, PassesAndTextEqualOneDevice) {
  Runs runs(GetParam());
  size_t number = 0;
  for (const auto& placed : testing::plans_of(GetParam(), runs.shape())) runs.expect_equal(placed, number++);
}

INSTANTIATE_TEST_SUITE_P(Families, PlacementSuite, ::testing::ValuesIn(testing::all_family_names()),
                         [](const auto& info) { return info.param; });

TEST(Placements, AreMoreThanFiveHundred) {
  size_t cuts = 0, dealt = 0, random = 0, together = 0, copied = 0;
  std::set<int> counts;
  for (const auto& family : testing::all_family_names()) {
    const auto shape = testing::placed_shape(models::parse_config(testing::placed_config(family), family));
    const auto plans = testing::plans_of(family, shape);
    cuts += testing::cut_plans(shape).size();
    dealt += testing::dealt_plans(shape).size();
    random += testing::kRandomMaps;
    EXPECT_EQ(testing::cut_plans(shape).size(), static_cast<size_t>(4 * (shape.n_layers + 1)));
    for (const auto& placed : plans) {
      counts.insert(static_cast<int>(placed.plan.devices().size()));
      if (shape.tied) ++(placed.plan.tied_copy ? copied : together);
    }
  }
  std::cout << testing::all_family_names().size() << " families, " << cuts + dealt + random << " placements: " << cuts
            << " cuts, " << dealt << " dealt to 3, 4 or 8 devices, " << random << " random maps; tied heads kept "
            << together << " times beside the embedding and copied " << copied << " times\n";
  EXPECT_GT(cuts + dealt + random, 500U);
  EXPECT_GT(together, 20U);
  EXPECT_GT(copied, 20U);
  EXPECT_GE(*counts.rbegin(), 6) << "the models have parts for that many devices";
}

}  // namespace placement_suite_test
}  // namespace emend
