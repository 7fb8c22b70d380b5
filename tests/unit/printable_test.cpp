// Text of others, as terminals, logs and reports show it.
#include <emend/core/json.h>
#include <emend/core/utf8.h>
#include <emend/evaluation/detail/page.h>
#include <emend/workflow/handles.h>
#include <emend/workflow/run_directory.h>
#include <gtest/gtest.h>

namespace emend {
namespace printable_test {

TEST(Printable, WhatSteersATerminalIsEscaped) {
  EXPECT_EQ(printable("Café 日本\t→ \"ok\"\n"), "Café 日本\t→ \"ok\"\n");
  EXPECT_EQ(printable("a\nb", false), "a\\u000ab");
  EXPECT_EQ(printable("\x1b[2Jx\r"), "\\u001b[2Jx\\u000d");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a\\u0000b");
  EXPECT_EQ(printable("\u202e\u2066\u200f\u061c\u2028\u009b\x7f"), "\\u202e\\u2066\\u200f\\u061c\\u2028\\u009b\\u007f");
  EXPECT_EQ(printable("a\xff\xc3"), "a\\xff\\xc3");
  EXPECT_TRUE(is_printable("Café\n"));
  EXPECT_FALSE(is_printable("Café\n", false));
  EXPECT_FALSE(is_printable("\u202e"));
}

TEST(Printable, ComposedFormsAreEqual) {
  EXPECT_EQ(folded("Cafe\u0301"), "caf\u00e9");
  EXPECT_EQ(folded("ÉIFFEL"), "éiffel");
  EXPECT_EQ(folded("Москва"), "москва");
  EXPECT_EQ(folded("Straße"), folded("STRASSE"));
  EXPECT_EQ(folded("O’Brien"), "o'brien");
  EXPECT_EQ(folded("ＡＢ"), "ab");
  EXPECT_EQ(folded("\xff"), "\xff");
  for (const char* text : {"", " \t\n", "\u00a0", "\u200b", "\u3000", "\u2028"}) EXPECT_TRUE(says_nothing(text));
  for (const char* text : {"a", " . ", "\xff", "東"}) EXPECT_FALSE(says_nothing(text));
}

TEST(Printable, JsonStaysTheSameJson) {
  const nlohmann::ordered_json document = {{"subject", "\u202e\x1b[31m\u009bx\x7f"}, {"lines", "a\nb"}};
  const std::string text = workflow::dump_json(document);
  EXPECT_TRUE(is_printable(text)) << text;
  EXPECT_EQ(nlohmann::ordered_json::parse(text), document);
}

TEST(Printable, ReportsShowTheEscapes) {
  const std::string page = evaluation::detail::fill_page({{"cases", {{{"subject", "\u202e\x1b[31m"}}}}});
  EXPECT_NE(page.find("\\\\u202e\\\\u001b[31m"), std::string::npos);
  EXPECT_TRUE(is_printable(page));
}

TEST(Printable, CommandsAreQuotedForAShell) {
  EXPECT_EQ(workflow::command_text({"memit_edit", "--out", "my run", "it's", "--set=a=b", ""}),
            "memit_edit --out 'my run' 'it'\\''s' --set=a=b ''");
}

}  // namespace printable_test
}  // namespace emend
