// Text of others, as terminals, logs and reports show it.
#include <emend/core/json.h>
#include <emend/core/log.h>
#include <emend/core/utf8.h>
#include <emend/evaluation/detail/page.h>
#include <emend/workflow/handles.h>
#include <emend/workflow/run_directory.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

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
  EXPECT_EQ(compatibility_form("É ﬁ Ａ\xff"), "E\u0301 fi A\ufffd");
  for (const char* text : {"", " \t\n", "\u00a0", "\u200b", "\u3000", "\u2028"}) EXPECT_TRUE(says_nothing(text));
  for (const char* text : {"a", " . ", "\xff", "東"}) EXPECT_FALSE(says_nothing(text));
}

TEST(Printable, LettersOfScriptsWithSpacesAreOfAWord) {
  for (const std::string word : {"s", "7", "é", "ש", "س", "न", "서"}) EXPECT_TRUE(in_spaced_word(word, 0)) << word;
  for (const std::string other : {".", " ", "東", "。", "ก"}) EXPECT_FALSE(in_spaced_word(other, 0)) << other;
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

// The time that is left is told from the speed since the first report, which comes with work done before the clock ran;
// the same work once more has a clock of its own.
TEST(Printable, ProgressKnowsWhatIsLeftFromTheSecondReportOn) {
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  const auto progress = make_progress(ends[1], 0);
  const auto report = [&](double done) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    progress({"read", done, 1000, ""});
  };
  for (const double done : {400, 400, 600, 1000, 400, 401, 1000}) report(done);
  progress({"write", 400, 1000, ""});
  for (const double done : {40, 1000, 200, 150, 990}) report(done);
  close(ends[1]);
  std::string text(4096, '\0');
  text.resize(static_cast<size_t>(std::max<ssize_t>(0, ::read(ends[0], text.data(), text.size()))));
  close(ends[0]);
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 13U) << text;
  EXPECT_EQ(lines[0], "read 40%");
  EXPECT_EQ(lines[1], "read 40%");
  EXPECT_EQ(lines[2].substr(0, 10), "read 60%, ");  // 200 in a tenth of a second
  EXPECT_EQ(lines[3], "read 100%");
  EXPECT_EQ(lines[4], "read 40%");
  EXPECT_GE(std::stoi(lines[5].substr(10)), 29) << lines[5];  // one in a twentieth, 599 to come
  EXPECT_EQ(lines[7], "write 40%");
  EXPECT_EQ(lines[10], "read 20%") << "begun again, further on than the first time";
  EXPECT_EQ(lines[11], "read 15%") << "threads side by side";
  EXPECT_EQ(lines[12].substr(0, 10), "read 99%, ");
}

}  // namespace printable_test
}  // namespace emend
