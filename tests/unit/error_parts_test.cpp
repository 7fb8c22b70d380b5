// The four parts of an error, and the page that explains the classes.
#include <emend/core/atomic_file.h>
#include <emend/core/cancel.h>
#include <emend/core/error.h>
#include <gtest/gtest.h>

namespace emend {
namespace error_parts_test {

void expect_parts(const ErrorParts& parts, const std::string& where, const std::string& got,
                  const std::string& expected, const std::string& advice) {
  EXPECT_EQ(parts.where, where);
  EXPECT_EQ(parts.got, got);
  EXPECT_EQ(parts.expected, expected);
  EXPECT_EQ(parts.advice, advice);
}

TEST(ErrorParts, AreThoseTheErrorWasMadeFrom) {
  const Error full(ErrorClass::kInvalidArgument, {"a: b", "c; d", "e", "f; g"});
  const Error short_one(ErrorClass::kIo, {"", "only this", "", ""});
  expect_parts(parts_of(full), "a: b", "c; d", "e", "f; g");
  expect_parts(parts_of(short_one), "", "only this", "", "");
}

TEST(ErrorParts, AnInterruptionNamesNoSettingThatTheCallerMayNotHave) {
  const CancelToken cancel;
  cancel.request();
  try {
    cancel.check("bench");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "bench: interrupted");
  }
}

TEST(ErrorParts, ANulInTheInputDoesNotCutTheTextOff) {
  const Error error(ErrorClass::kNotFound, {std::string("\0map.yml", 8), "no such file", "", ""});
  EXPECT_STREQ(error.what(), "?map.yml: no such file");
}

TEST(ErrorParts, ThePageOfErrorsNamesEveryClass) {
  const auto page = read_file(std::filesystem::path(EMEND_SOURCE_DIR) / "docs" / "errors.md");
  for (int i = 0; i <= static_cast<int>(ErrorClass::kCancelled); ++i) {
    const auto error_class = static_cast<ErrorClass>(i);
    const std::string row =
        "| `" + std::string(to_string(error_class)) + "` | " + std::to_string(exit_code(error_class)) + " |";
    EXPECT_NE(page.find(row), std::string::npos) << "docs/errors.md has no row " << row;
  }
}

}  // namespace error_parts_test
}  // namespace emend
