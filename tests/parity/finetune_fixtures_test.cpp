// Fine-tuning against the published code: weights, gradients, losses of every step, outputs.
#include <gtest/gtest.h>

#include "oracle/editor_fixture.h"
#include "support/shared.h"

namespace finetune_fixtures_test {

using emend::editors::Engine;

void expect_match(Engine engine) {
  const auto report = emend::editors::eval_editor_fixture(
      emend::testing::shared_dir() / "fixtures" / "editors", engine, {},
      [](const std::string&, const std::string& editor, const std::string&) { return editor.starts_with("ft_"); });
  for (const char* editor : {"ft_l", "ft_m"}) {
    ASSERT_TRUE(report.contains(editor)) << editor;
    const auto& result = report[editor];
    EXPECT_EQ(result["models"].size(), 2U) << editor;
    EXPECT_TRUE(result.at("within_tolerance").get<bool>())
        << editor << ": " << result.at("failures").dump(1).substr(0, 4000);
    for (const char* kind : {"weight_change", "loss", "after_logits"})
      EXPECT_TRUE(result.at("max_abs_diff").contains(kind)) << editor << " compared no " << kind;
    ::testing::Test::RecordProperty(editor, result["relative"].dump());
  }
}

TEST(FinetuneFixtures, FastEngineMatches) {
  EMEND_NEEDS_SHARED();
  expect_match(Engine::kFast);
}

TEST(FinetuneFixtures, ReferenceEngineMatches) {
  EMEND_NEEDS_SHARED();
  expect_match(Engine::kReference);
}

}  // namespace finetune_fixtures_test
