// The tables in docs/hparams.md and docs/formats/facts.md are the ones that the declarations give.
#include <emend/core/atomic_file.h>
#include <emend/core/text.h>
#include <emend/datasets/lint.h>
#include <emend/hparams/locate.h>
#include <emend/hparams/preset.h>
#include <gtest/gtest.h>

namespace emend {
namespace hparams_docs_test {

std::string document(const char* path) {
  return read_file(std::filesystem::path(EMEND_SOURCE_DIR) / "docs" / path);
}

std::string table_of(const std::vector<hparams::FieldInfo>& fields) {
  std::string text = "| name | type | default | meaning |\n|---|---|---|---|\n";
  for (const auto& [name, type, default_text, options] : fields) {
    const std::string limits = hparams::detail::limits_text(options);
    const std::string formula = options.formula.empty() ? "" : " (" + options.formula + ")";
    text += "| `" + name + "` | " + type + (limits.empty() ? "" : ", " + limits) + " | " +
            (options.required ? "required" : "`" + default_text + "`") + " | " +
            replace_all(options.meaning + formula, "|", "\\|") + " |\n";
  }
  return text;
}

TEST(HparamsDocs, SharedFieldsAreUpToDate) {
  const std::string text = document("hparams.md");
  const std::string begin = "<!-- begin locate_schema -->\n", end = "<!-- end locate_schema -->";
  const size_t from = text.find(begin), to = text.find(end);
  ASSERT_NE(from, std::string::npos);
  ASSERT_NE(to, std::string::npos);
  EXPECT_EQ(text.substr(from + begin.size(), to - from - begin.size()), table_of(hparams::locate_schema().fields()))
      << "paste the second text between the marks of docs/hparams.md";
}

TEST(HparamsDocs, EveryEditorWithPresetsIsNamed) {
  const std::string text = document("hparams.md");
  for (const hparams::Preset& preset : hparams::all_presets())
    EXPECT_NE(text.find("`" + preset.editor + "`"), std::string::npos) << preset.editor;
}

TEST(HparamsDocs, FormatsAndLintChecksAreNamed) {
  const std::string text = document("formats/facts.md");
  for (const datasets::FormatInfo& format : datasets::fact_formats())
    EXPECT_NE(text.find("| `" + format.name + "` |"), std::string::npos) << format.name;
  for (const datasets::LintInfo& check : datasets::lint_checks())
    EXPECT_NE(text.find("| `" + check.name + "` | " + check.meaning + " |"), std::string::npos) << check.name;
}

}  // namespace hparams_docs_test
}  // namespace emend
