#include <emend/core/atomic_file.h>
#include <emend/core/sha256.h>
#include <emend/core/utf8.h>
#include <emend/datasets/corpus.h>
#include <gtest/gtest.h>

namespace emend::datasets {
namespace corpus_test {

class CorpusTest : public ::testing::Test {
 protected:
  std::filesystem::path path_ = std::filesystem::path(::testing::TempDir()) / "emend_corpus_test.txt";
  void TearDown() override { std::filesystem::remove(path_); }
  /// "text@line|…"
  std::string documents(const std::string& text, size_t most = 100) {
    write_file(path_, text);
    std::string list;
    read_corpus(path_, [&](const Document& document) {
      list += (list.empty() ? "" : "|") + document.text + "@" + std::to_string(document.line);
      return --most > 0;
    });
    return list;
  }
};

TEST_F(CorpusTest, TextWithoutBlankLinesHasOneDocumentALine) {
  EXPECT_EQ(documents("one\ntwo\r\n  three  \n"), "one@1|two@2|three@3");
  EXPECT_EQ(documents("only"), "only@1");
  EXPECT_EQ(documents("one\ntwo\n\n\n"), "one@1|two@2") << "blank lines at the end separate nothing";
}

TEST_F(CorpusTest, BlankLinesSeparateParagraphs) {
  EXPECT_EQ(documents("one\ntwo\n\nthree\n \t\n\nfour"), "one\ntwo@1|three@4|four@7");
  EXPECT_EQ(documents("\n\none\n\ntwo\n"), "one@3|two@5");
  EXPECT_EQ(documents("one\r\n\r\ntwo\r\n"), "one@1|two@3");
}

TEST_F(CorpusTest, JsonLinesAndArrays) {
  EXPECT_EQ(documents("{\"text\": \"one\\n\\nmore\", \"id\": 3}\n\n{\"text\": \" \"}\n{\"text\": \"dös\"}\n"),
            "one\n\nmore@1|dös@4");
  EXPECT_EQ(documents("[{\"text\": \"one\"},\n{\"text\": \"two\"}]"), "one@1|two@2");
  EXPECT_EQ(documents("\xEF\xBB\xBF{\"text\": \"one\"}"), "one@1");
}

TEST_F(CorpusTest, NoMoreThanIsWanted) {
  EXPECT_EQ(documents("one\ntwo\nb\xff", 2), "one@1|two@2");
  EXPECT_EQ(documents("{\"text\": \"one\"}\n{", 1), "one@1");
  EXPECT_EQ(documents("[{\"text\": \"one\"}, {\"text\": 1}]", 1), "one@1");
}

TEST_F(CorpusTest, Hash) {
  write_file(path_, "one\ntwo\n");
  EXPECT_EQ(corpus_hash(path_), sha256_hex("one\ntwo\n"));
}

TEST(Utf8, WellFormedSequencesOnly) {
  EXPECT_FALSE(first_invalid_utf8("").has_value());
  EXPECT_FALSE(first_invalid_utf8("plain text, more than eight bytes").has_value());
  EXPECT_FALSE(first_invalid_utf8("é 東京 🇬🇧 \xF4\x8F\xBF\xBF \xEF\xBF\xBF \xED\x9F\xBF").has_value());
  EXPECT_EQ(first_invalid_utf8("12345678\xC3"), 8U);
  EXPECT_EQ(first_invalid_utf8("ab\xED\xA0\x80"), 2U) << "surrogates";
  EXPECT_EQ(first_invalid_utf8("\xC1\xBF"), 0U) << "overlong";
  EXPECT_EQ(first_invalid_utf8("\xF4\x90\x80\x80"), 0U) << "past U+10FFFF";
  EXPECT_EQ(line_of_offset("a\nb\nc", 0), 1);
  EXPECT_EQ(line_of_offset("a\nb\nc", 4), 3);
}

}  // namespace corpus_test
}  // namespace emend::datasets
