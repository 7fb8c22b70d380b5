// Every family against the recorded reference, with both spellings of its configuration.
#include <ATen/ATen.h>
#include <emend/core/safetensors.h>
#include <gtest/gtest.h>

#include <iostream>

#include "oracle/model_fixture.h"
#include "support/family_suite.h"
#include "support/shared.h"
#include "support/spread_plan.h"
#include "support/temporary_folder.h"

namespace emend::models {
namespace model_fixture_test {

// Exact and tanh GELU differ by about 1e-3 in these logits, so a looser bound would hide a wrong activation.
constexpr double kTolerance = 1e-4;

// Beside it, a share of a tensor's largest value: hidden states of 10 and more have no digits left below 1e-4 after
// seven layers in float32, and processors differ in the last ones.
constexpr double kRelativeTolerance = 1e-5;

// Fails unless every recorded tensor is met. Returns the largest difference.
double expect_recorded(const std::string& folder, const nlohmann::json& result) {
  const SafetensorsFile expected(std::filesystem::path(folder) / "expected.safetensors");
  double worst = 0;
  for (const auto& [name, diff] : result["max_abs_diff"].items()) {
    const double largest =
        expected.contains(name) ? expected.tensor(name).to(at::kDouble).abs().max().item<double>() : 0;
    EXPECT_LE(diff.get<double>(), kTolerance + kRelativeTolerance * largest) << name;
    worst = std::max(worst, diff.get<double>());
  }
  return worst;
}

std::vector<std::string> fixture_folders() {
  std::vector<std::string> folders;
  for (const auto& root : {std::filesystem::path(EMEND_SOURCE_DIR) / "tests" / "fixtures" / "models",
                           emend::testing::shared_dir() / "fixtures"}) {
    if (!std::filesystem::is_directory(root)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(root))
      if (std::filesystem::exists(entry.path() / "expected.safetensors") &&
          std::filesystem::exists(entry.path() / "config.json"))
        folders.push_back(entry.path().string());
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

class ModelFixture : public ::testing::TestWithParam<std::string> {};

TEST_P(ModelFixture, EqualsTheReference) {
  const nlohmann::json result = eval_fixture(GetParam());
  const double worst = expect_recorded(GetParam(), result);
  EXPECT_TRUE(result["missing"].empty()) << result["missing"];
  EXPECT_TRUE(result["generation_equal"].get<bool>());
  EXPECT_GE(result["max_abs_diff"].size(), 5u);
  std::cout << "[ figure   ] " << std::filesystem::path(GetParam()).filename().string() << ": largest difference "
            << worst << " over " << result["max_abs_diff"].size() << " tensors"
            << (result.contains("legacy") ? ", two configurations" : "") << "\n";
}

TEST_P(ModelFixture, EqualsTheReferenceOnThreeDevices) {
  const nlohmann::json result = eval_fixture(GetParam(), {.place = testing::spread_plan});
  (void)expect_recorded(GetParam(), result);
  EXPECT_TRUE(result["missing"].empty()) << result["missing"];
  EXPECT_TRUE(result["generation_equal"].get<bool>());
}

// What every family must do, on the model of the folder: sites, packing, restarts, caches, orientation, module names.
TEST_P(ModelFixture, ConformsOnOneDeviceAndOnThree) {
  for (const bool split : {false, true}) {
    LoadOptions options{.tokenizer = false};
    if (split) options.place = testing::spread_plan;
    testing::FamilySuite suite(load_model(GetParam(), options));
    suite.every_site_fires();
    suite.every_site_can_be_edited();
    suite.inner_sites_agree(kTolerance);
    suite.packing_changes_nothing(kTolerance);
    suite.restart_equals_whole(kTolerance);
    suite.cache_equals_whole(kTolerance);
    suite.edit_site_is_oriented(kTolerance);
    const ModuleNames& m = suite.model().family().modules;
    check_module_names(suite.model().family(), suite.model().config(),
                       {m.layer, m.attn, m.mlp, m.rewrite, m.ln_f, m.lm_head},
                       [](const char*) { return std::string("test.yaml"); });
    for (int l = 0; suite.model().config().no_edit_site.empty() && l < suite.model().n_layers(); ++l) {
      std::string weight = m.rewrite + ".weight";
      weight.replace(weight.find("{}"), 2, std::to_string(l));
      EXPECT_TRUE(suite.model().has_weight(weight)) << weight;
      EXPECT_TRUE(
          at::equal(suite.model().weight(weight), suite.model().weight(suite.model().edit_site(l).weight_name)));
    }
  }
}

TEST_P(ModelFixture, SavesAndLoadsToTheSameWeights) {
  const testing::TemporaryFolder folder("fixture_" + std::filesystem::path(GetParam()).filename().string());
  const Model model = load_model(GetParam());
  EXPECT_TRUE(save_model(model, folder / "model").empty());
  const Model again = load_model((folder / "model").string());
  EXPECT_EQ(again.current_fingerprint(), model.current_fingerprint());
  EXPECT_EQ(again.fingerprint(), model.fingerprint());
  EXPECT_EQ(again.weight_names(), model.weight_names());
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
  const std::filesystem::path path(info.param);
  const bool copied = path.parent_path().filename() == "models";
  return path.filename().string() + (copied ? "_copied" : "");
}

INSTANTIATE_TEST_SUITE_P(Folders, ModelFixture, ::testing::ValuesIn(fixture_folders()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ModelFixture);

}  // namespace model_fixture_test
}  // namespace emend::models
