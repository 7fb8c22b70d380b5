// Every family against the recorded reference, with both spellings of its configuration.
#include <emend/models/fixture.h>
#include <gtest/gtest.h>

#include <iostream>

#include "support/debug_models.h"
#include "support/shared.h"

namespace emend::models {
namespace {

// Exact and tanh GELU differ by about 1e-3 in these logits, so a looser bound would hide a wrong activation.
constexpr double kTolerance = 1e-4;

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
  double worst = 0;
  for (const auto& [name, diff] : result["max_abs_diff"].items()) {
    EXPECT_LE(diff.get<double>(), kTolerance) << name;
    worst = std::max(worst, diff.get<double>());
  }
  EXPECT_TRUE(result["missing"].empty()) << result["missing"];
  EXPECT_TRUE(result["generation_equal"].get<bool>());
  EXPECT_GE(result["max_abs_diff"].size(), 5u);
  std::cout << "[ figure   ] " << std::filesystem::path(GetParam()).filename().string() << ": largest difference "
            << worst << " over " << result["max_abs_diff"].size() << " tensors"
            << (result.contains("legacy") ? ", two configurations" : "") << "\n";
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
  const std::filesystem::path path(info.param);
  const bool copied = path.parent_path().filename() == "models";
  return path.filename().string() + (copied ? "_copied" : "");
}

INSTANTIATE_TEST_SUITE_P(Folders, ModelFixture, ::testing::ValuesIn(fixture_folders()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ModelFixture);

}  // namespace
}  // namespace emend::models
