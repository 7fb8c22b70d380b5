// Every tensor that the published implementations recorded, in both engines.
#include <emend/editors/fixture.h>
#include <gtest/gtest.h>

#include "support/shared.h"

namespace {

using emend::editors::Engine;

void expect_match(Engine engine) {
  const auto report = emend::editors::eval_editor_fixture(emend::testing::shared_dir() / "fixtures" / "editors", engine);
  int editors = 0;
  for (const auto& [editor, result] : report.items()) {
    if (editor == "missing") continue;
    ++editors;
    EXPECT_TRUE(result.at("within_tolerance").get<bool>()) << editor << ": " << result.at("failures").dump(1).substr(0, 4000);
    EXPECT_GT(result.at("compared").get<int>(), 100) << editor;
  }
  EXPECT_GE(editors, 2);
  for (const char* editor : {"memit", "rome"}) {
    ASSERT_TRUE(report.contains(editor)) << editor;
    EXPECT_EQ(report[editor]["models"].size(), 2U) << editor;
    std::string line;
    for (const auto& [kind, value] : report[editor]["relative"].items()) line += kind + "=" + value.dump() + " ";
    ::testing::Test::RecordProperty(editor, line);
  }
}

TEST(EditorFixtures, ReferenceEngineMatches) {
  EMEND_NEEDS_SHARED();
  expect_match(Engine::kReference);
}

TEST(EditorFixtures, FastEngineMatches) {
  EMEND_NEEDS_SHARED();
  expect_match(Engine::kFast);
}

}  // namespace
