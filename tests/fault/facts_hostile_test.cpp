// Facts and corpus files that are damaged or made to do harm: each ends in an error with a line number, soon.
#include <emend/core/atomic_file.h>
#include <emend/datasets/corpus.h>
#include <emend/datasets/fact.h>
#include <gtest/gtest.h>

#include <random>

#include "support/error_of.h"

namespace emend::datasets {
namespace facts_hostile_test {

const std::string kRow = R"({"prompt": "{} is", "subject": "A", "target_new": "x"})";

using testing::repeat;

void expect_refusal(const std::string& text, const std::string& part) {
  const std::string message = testing::expect_refused(
      [&] {
        (void)parse_facts(text, "bad.json");
        ADD_FAILURE() << "accepted: " << text.substr(0, 200);
      },
      ErrorClass::kCorruption, {"; expected ", part}, 1500);
  EXPECT_TRUE(message.starts_with("bad.json")) << message;
}

TEST(FactsHostile, EmptyAndForeign) {
  expect_refusal("", "the file is empty");
  expect_refusal(" \n\n\t", "the file is empty");
  expect_refusal("\xEF\xBB\xBF", "the file is empty");
  expect_refusal("[]", "an empty list");
  expect_refusal("prompt,subject,target_new\n", "no rows");
  expect_refusal("not json", "bad.json:1: text that is neither [ nor {");
  expect_refusal("\n\n<html>", "bad.json:3");
  expect_refusal("[1, 2]", "bad.json:1: a row that is not an object");
  expect_refusal("[[" + kRow + "]]", "a row that is not an object");
  expect_refusal("{}", "with the keys (none)");
  expect_refusal("{\"data\": [" + kRow + "]}", "with the keys data");
}

TEST(FactsHostile, CutOffAnywhere) {
  const std::string text = "[\n" + kRow + ",\n" + kRow + "\n]";
  ASSERT_EQ(parse_facts(text, "whole").facts.size(), 2U);
  for (size_t length = 1; length < text.size(); ++length) expect_refusal(text.substr(0, length), "bad.json");
  expect_refusal("[\n" + kRow + ",\n{\"prompt\": \"{} is\", \"sub",
                 "bad.json:3: the row that starts here ends inside a string");
  expect_refusal("[\n" + kRow + ",\n{\"prompt\": [1, 2", "bad.json:3: the row that starts here has no end");
  expect_refusal("[\n" + kRow + "\n", "bad.json:3: the array has no closing ]");
  expect_refusal(kRow + "\n" + kRow.substr(0, 20), "bad.json:2");
}

TEST(FactsHostile, PunctuationAndTrailingText) {
  expect_refusal("[" + kRow + "\n" + kRow + "]", "bad.json:2: no comma before this row");
  expect_refusal("[" + kRow + ",\n]", "bad.json:2: a comma after the last row");
  expect_refusal("[" + kRow + "]\nmore", "bad.json:2: text after the closing ]");
  expect_refusal(kRow + "\n{\"prompt\": \"{} is\",, \"subject\": \"A\"}", "bad.json:2: syntax error");
  expect_refusal(kRow + "\n{'prompt': 'x'}", "bad.json:2: syntax error");
  expect_refusal("[{\"prompt\": \"{} is\",\n \"subject\": \"A\",\n \"target_new\" \"x\"}]", "bad.json:3: syntax error");
  expect_refusal("[{\"prompt\": \"\\ud800 {} is\", \"subject\": \"A\", \"target_new\": \"x\"}]",
                 "bad.json:1: syntax error");
  expect_refusal("[{\"prompt\": \"{} is\", \"subject\": \"A\", \"target_new\": 1e99999}]", "bad.json:1");
}

TEST(FactsHostile, BytesThatAreNotText) {
  expect_refusal("[\n{\"prompt\": \"\xff\"}]", "bad.json:2: a byte that is not UTF-8");
  expect_refusal("[\n\n{\"prompt\": \"caf\xe9 {}\", \"subject\": \"A\"}]", "bad.json:3: a byte that is not UTF-8");
  for (const char* sequence : {"\x80", "\xC0\x80", "\xC3", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80",
                               "\xF4\x90\x80\x80", "\xF8\x88\x80\x80\x80"})
    expect_refusal(std::string("[\"") + sequence + "\"]", "not UTF-8");
  std::string with_nul = "[\n" + kRow + "]";
  with_nul[10] = '\0';
  expect_refusal(with_nul, "bad.json:2: a NUL byte at offset 10");
  std::string wide;
  for (const char c : kRow) wide += std::string(1, c) + '\0';
  expect_refusal(wide, "UTF-16");
}

TEST(FactsHostile, NestingAndSize) {
  for (const size_t depth : {65UL, 10'000UL, 1'000'000UL}) {
    expect_refusal("[{\"a\": " + repeat("[", depth) + repeat("]", depth) + "}]", "nesting of more than 64 levels");
    expect_refusal(repeat("{\"a\": ", depth), "bad.json:1");
    expect_refusal(repeat("[", depth), "a row that is not an object");
    expect_refusal(kRow + "\n{\"a\": " + repeat("[", depth) + repeat("]", depth) + "}", "bad.json:2: nesting");
  }
  expect_refusal("{\"" + repeat("k", 10'000'000) + "\": 1}", "a row with the keys kkk");
  const std::string big = "[" + repeat(kRow + ",\n", 20'000) + kRow + "]";
  EXPECT_EQ(parse_facts(big, "big").facts.size(), 20'001U);
}

TEST(FactsHostile, FilesThatCannotBeRead) {
  EXPECT_THROW((void)load_facts("/nonexistent.json"), Error);
  EXPECT_THROW((void)load_facts(::testing::TempDir()), Error);
  const auto path = std::filesystem::path(::testing::TempDir()) / "emend_facts_hostile.json";
  write_file(path, "[" + kRow + "]");
  EXPECT_EQ(load_facts(path).facts.size(), 1U);
  testing::error_of([&] { (void)load_facts(path, {.max_bytes = 10}); }, ErrorClass::kUnsupported);
  std::filesystem::remove(path);
}

/// Random damage to a good file never gives anything but facts or an Error.
TEST(FactsHostile, RandomDamage) {
  const std::string text = "[\n" + kRow +
                           ",\n{\"case_id\": 1, \"requested_rewrite\": {\"prompt\": \"{} é\", \"subject\": \"B\", "
                           "\"target_new\": {\"str\": \"y\"}}, \"paraphrase_prompts\": [\"p\"]},\n" +
                           "{\"subject\": \"C\", \"src\": \"Where is C?\", \"answers\": [\"x\", [\"y\"]], \"alt\": "
                           "\"z\", \"loc\": \"l\", \"loc_ans\": 3}\n]";
  std::mt19937 random(7);
  size_t accepted = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string damaged = text;
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < changes; ++i) {
      const size_t at = random() % damaged.size();
      switch (random() % 3) {
        case 0:
          damaged[at] = static_cast<char>(random());
          break;
        case 1:
          damaged.erase(at, 1 + random() % 5);
          break;
        default:
          damaged.insert(at, 1, "{}[]\",:0n\\"[random() % 10]);
      }
    }
    try {
      const FactSet set =
          parse_facts(damaged, "bad.json", {.bad_rows = round % 2 ? BadRowPolicy::kSkip : BadRowPolicy::kError});
      for (const Fact& fact : set.facts) validate(fact);
      ++accepted;
    } catch (const Error& error) {
      ASSERT_NE(std::string(error.what()).find("bad.json"), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(accepted, 100U) << "the damage is so strong that nothing beyond the parser is reached";
}

class CorpusHostile : public ::testing::Test {
 protected:
  std::filesystem::path path_ = std::filesystem::path(::testing::TempDir()) / "emend_corpus_hostile.txt";
  void TearDown() override { std::filesystem::remove(path_); }
  void expect_bad(const std::string& text, const std::string& part, int64_t most_bytes = 1000) {
    write_file(path_, text);
    const auto take_all = [](const Document&) { return true; };
    testing::expect_refused([&] { read_corpus(path_, take_all, most_bytes); }, ErrorClass::kCorruption, {part});
  }
};

TEST_F(CorpusHostile, Refusals) {
  expect_bad("", "the file is empty");
  expect_bad("  \n \n", "the file is empty");
  expect_bad(
      "good\n\nb\xff"
      "d\n",
      ":3: a byte that is not UTF-8");
  expect_bad(std::string("good\nba\0d\n", 10), ":2: a NUL byte");
  expect_bad("{\"text\": \"a\"}\n{\"txt\": \"b\"}\n", ":2: field \"text\" is missing");
  expect_bad("{\"text\": \"a\"}\n{\"text\": 5}\n", ":2: field \"text\" is the number 5");
  expect_bad("{\"text\": \"a\"}\n{\"text\": \"b\n", ":2: a line that is not a JSON object");
  expect_bad("{\"text\": \"a\"}\nplain text\n", ":2: a line that is not a JSON object");
  expect_bad("{\"text\": \"a\"}\n{\"text\": \"\xff\"}\n", ":2: a byte that is not UTF-8");
  expect_bad("[{\"text\": \"a\"},\n {\"text\": \"b\"}", ":2: the array has no closing ]");
  expect_bad("short\n\n" + repeat("long ", 100) + "\n", ":3: a document of", 100);
  EXPECT_THROW(read_corpus("/nonexistent.txt", nullptr), Error);
}

}  // namespace facts_hostile_test
}  // namespace emend::datasets
