// Every tensor that the published implementations recorded, in both engines.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "oracle/editor_fixture.h"
#include "support/shared.h"

namespace editor_fixtures_test {

using emend::editors::Engine;

void expect_match(Engine engine, int compared, const emend::editors::FixtureFilter& wanted = {},
                  const std::string& device_map = "cpu") {
  const auto report = emend::editors::eval_editor_fixture(emend::testing::shared_dir() / "fixtures" / "editors", engine,
                                                          {}, wanted, device_map);
  for (const char* editor : {"memit", "rome", "r_rome", "emmet", "pmet", "alphaedit", "memit_seq", "rect"}) {
    ASSERT_TRUE(report.contains(editor)) << editor;
    EXPECT_EQ(report[editor]["models"].size(), 2U) << editor;
    EXPECT_GT(report[editor]["compared"].get<int>(), compared) << editor;
  }
  for (const auto& [editor, result] : report.items()) {
    if (editor == "missing") continue;
    EXPECT_TRUE(result.at("within_tolerance").get<bool>())
        << editor << ": " << result.at("failures").dump(1).substr(0, 4000);
    std::string line;
    for (const auto& [kind, value] : result["relative"].items()) line += kind + "=" + value.dump() + " ";
    ::testing::Test::RecordProperty(editor, line);
  }
}

TEST(EditorFixtures, FastEngineMatches) {
  EMEND_NEEDS_SHARED();
  expect_match(Engine::kFast, 100);
}

// A variant of each editor on one of the models, and each way of optimising on both.
bool sample(const std::string& model, const std::string& editor, const std::string& variant) {
  static const std::map<std::string, std::pair<std::string, std::string>> variants = {
      {"memit", {"gpt2_tiny", "a"}},       {"alphaedit", {"llama_tiny", "one"}}, {"rome", {"llama_tiny", "seq"}},
      {"r_rome", {"gpt2_tiny", "prompt"}}, {"emmet", {"llama_tiny", "a"}},       {"rect", {"gpt2_tiny", "a"}},
      {"pmet", {"gpt2_tiny", "b"}},        {"memit_seq", {"llama_tiny", "two"}},
  };
  const auto found = variants.find(editor);
  return found != variants.end() && found->second == std::pair(model, variant);
}

// The reference engine computes the whole vocabulary at every token: the sample is enough for every run of the tests.
// `emend eval-editor-fixture --engine reference` does them all, `--device-map cuda:0` on a GPU.
TEST(EditorFixtures, ReferenceEngineMatches) {
  EMEND_NEEDS_SHARED();
  expect_match(Engine::kReference, 50, sample);
}

TEST(EditorFixtures, TwoDevicesMatch) {
  EMEND_NEEDS_SHARED();
  expect_match(Engine::kFast, 50, sample, "sim:2");
}

}  // namespace editor_fixtures_test
