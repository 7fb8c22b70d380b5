// Every family split over three simulated devices: the suite of one device, and the same numbers as there.
#include <emend/editors/steps/apply.h>

#include <algorithm>

#include "support/family_suite.h"
#include "support/spread_plan.h"
#include "support/temporary_folder.h"

namespace emend::models {
namespace family_placement_test {

using hooks::Site;
using testing::FamilyFlavour;
using testing::FamilySuite;
using testing::sim;

constexpr double kTolerance = 2e-5;  // as on one device

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (devices::to_host(a.detach()) - devices::to_host(b.detach())).abs().max().item<double>();
}

class Placement : public ::testing::TestWithParam<FamilyFlavour> {};

TEST_P(Placement, ConformsOnThreeDevices) {
  FamilySuite suite(GetParam(), testing::spread_plan);
  suite.every_site_fires();
  suite.every_site_can_be_edited();
  suite.packing_changes_nothing(kTolerance);
  suite.restart_equals_whole(kTolerance);
  suite.cache_equals_whole(kTolerance);
  suite.edit_site_is_oriented(kTolerance);
}

TEST_P(Placement, LogitsKeysAndGradientsEqualOneDevice) {
  FamilySuite split(GetParam(), testing::spread_plan), whole(GetParam(), {});
  EXPECT_EQ(split.model().current_fingerprint(), whole.model().current_fingerprint());
  const auto batch = TokenBatch::from_rows(testing::suite_rows());
  const bool dense = whole.model().config().no_edit_site.empty();
  struct Numbers {
    at::Tensor logits, gradient;
    std::vector<at::Tensor> keys;
  };
  const auto run = [&](const Model& model) {
    // δ at one token of the first layer's MLP output, as editors add it.
    at::Tensor delta = at::full({model.hidden_size()}, 0.01).requires_grad_(true);
    hooks::HookSession session(model.hooks());
    session.edit({dense ? Site::kMlpDownOut : Site::kMlpOut, 0}, [&](const at::Tensor& x) {
      const at::Tensor row = devices::route_like(delta, x, devices::Purpose::kDelta).unsqueeze(0);
      const at::Tensor at_token =
          devices::route_like(at::tensor({batch.token(0, 2)}, at::kLong), x, devices::Purpose::kInput);
      return x.index_add(0, at_token, row);
    });
    if (dense)
      for (int l = 0; l < model.n_layers(); ++l) session.capture({Site::kMlpDownIn, l});
    session.attach();
    Numbers numbers;
    numbers.logits = devices::to_host(model.forward(batch).logits);
    const at::Tensor loss = -at::log_softmax(numbers.logits[batch.token(0, 4)], -1)[5];
    numbers.gradient = torch::autograd::grad({loss}, {delta})[0];
    if (dense)
      for (int l = 0; l < model.n_layers(); ++l) numbers.keys.push_back(session.captured({Site::kMlpDownIn, l}));
    session.finish();
    return numbers;
  };
  const Numbers here = run(whole.model()), there = run(split.model());
  EXPECT_LE(difference(there.logits, here.logits), kTolerance);
  EXPECT_GT(here.gradient.abs().max().item<double>(), 0);
  EXPECT_LE(difference(there.gradient, here.gradient), kTolerance);
  ASSERT_EQ(there.keys.size(), here.keys.size());
  for (size_t l = 0; l < here.keys.size(); ++l) {
    EXPECT_EQ(there.keys[l].device(), sim(static_cast<int>((l + 1) % 3)));
    EXPECT_LE(difference(there.keys[l], here.keys[l]), kTolerance) << "layer " << l;
  }
}

TEST_P(Placement, AWriteReachesBothCopiesOfATiedHead) {
  FamilySuite suite(GetParam(), testing::spread_plan);
  Model& model = suite.model();
  const auto& names = model.weight_names();
  const auto twice = std::find_if(names.begin(), names.end(),
                                  [&](const std::string& name) { return model.weight_copies(name).size() == 2; });
  EXPECT_EQ(twice != names.end(), model.config().tied_head);
  if (twice == names.end()) return;
  const auto copies = model.weight_copies(*twice);
  EXPECT_NE(copies[0].device(), copies[1].device());
  model.set_weight(*twice, copies[0] * 2);
  EXPECT_EQ(difference(copies[0], copies[1]), 0);
  const at::Tensor before = copies[0].clone();
  editors::EditTransaction transaction(model);
  const auto delta = editors::WeightDelta::as_stored(*twice, -1, at::ones(before.sizes(), at::kDouble));
  (void)editors::apply_delta(delta, transaction);
  EXPECT_GT(difference(copies[0], before), 0.5);
  EXPECT_EQ(difference(copies[0], copies[1]), 0) << "a change as well";
}

TEST_P(Placement, SavesToTheSameFileAsOneDevice) {
  const testing::TemporaryFolder folder("placement_" + GetParam().family + GetParam().flavour);
  FamilySuite split(GetParam(), testing::spread_plan);
  (void)save_model(split.model(), folder / "model");
  FamilySuite whole(GetParam(), {});
  const Model again = load_model((folder / "model").string());
  EXPECT_EQ(again.current_fingerprint(), whole.model().current_fingerprint());
}

INSTANTIATE_TEST_SUITE_P(All, Placement, ::testing::ValuesIn(testing::all_flavours()), testing::flavour_name);

}  // namespace family_placement_test
}  // namespace emend::models
