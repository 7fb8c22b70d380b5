// Hyper-parameter files made to hang, exhaust or confuse the reader: each ends in an error of four parts, soon.
#include <emend/core/atomic_file.h>
#include <emend/hparams/locate.h>
#include <gtest/gtest.h>

#include "support/error_of.h"

namespace emend::hparams {
namespace hparams_hostile_test {

using testing::repeat;

void expect_refusal(const std::string& text, const std::string& part) {
  const std::string message = testing::expect_refused(
      [&] {
        (void)locate_schema().parse(parse_hparams(text, "bad.yaml"));
        ADD_FAILURE() << "accepted: " << text.substr(0, 200);
      },
      ErrorClass::kInvalidArgument, {part}, 1200);
  EXPECT_TRUE(message.starts_with("bad.yaml")) << message;
}

TEST(HparamsHostile, AnchorsAndAliases) {
  std::string bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n";
  for (char c = 'b'; c < 'k'; ++c)
    bomb += std::string(1, c) + ": &" + c + " [" + repeat(std::string("*") + static_cast<char>(c - 1) + ",", 9) + "]\n";
  expect_refusal(bomb, "bad.yaml:1: an anchor or alias");
  expect_refusal("layers: [4]\nv_lr: *x\n", "bad.yaml:2");
  expect_refusal("base: &b\n  v_lr: 1\n<<: *b\n", "anchor");
  expect_refusal("<<: {v_lr: 1}\n", "anchor");
}

TEST(HparamsHostile, DeepNesting) {
  for (const size_t depth : {100UL, 10'000UL, 100'000UL}) {
    expect_refusal("layers: " + repeat("[", depth), "bad.yaml:1");
    expect_refusal("layers: " + repeat("[", depth) + repeat("]", depth), "nesting of more than 64 levels");
    expect_refusal("{\"layers\": " + repeat("[", depth) + repeat("]", depth) + "}", "nesting of more than 64 levels");
    expect_refusal(repeat("{\"a\":", std::min(depth, size_t{50'000})), "bad.yaml:1");
    expect_refusal(repeat("- ", std::min(depth, size_t{100'000})), "bad.yaml:1");
    expect_refusal(repeat("? ", std::min(depth, size_t{100'000})), "bad.yaml:1");
    expect_refusal(repeat("{a: ", std::min(depth, size_t{50'000})), "bad.yaml:1");
  }
  std::string stairs;
  for (int i = 0; i < 500; ++i) stairs += std::string(static_cast<size_t>(i), ' ') + "a:\n";
  expect_refusal(stairs, "nesting of more than 64 levels");
}

TEST(HparamsHostile, HugeFilesAndScalars) {
  expect_refusal("layers: [4]\nfact_token: " + repeat("x", 10'000'000), "at most 256 KiB");
  expect_refusal("layers: [4]\nfact_token: \"" + repeat("x", 200'000) + "\"", "one of subject_last");
  expect_refusal("layers: [" + repeat("4,", 100'000) + "]", "ascending");
  expect_refusal(repeat("x: 1\n", 40'000), "given twice");
  std::string many;
  for (int i = 0; i < 15'000; ++i) many += "key" + std::to_string(i) + ": 1\n";
  expect_refusal(many, "unknown field \"key0\"");
  expect_refusal(std::string(200'000, ':'), "bad.yaml:1");
  expect_refusal(repeat("\n", 200'000) + "]", "bad.yaml:200001");
  expect_refusal(repeat("\"a\" ", 40'000), "bad.yaml:1");
  expect_refusal("a: |" + repeat("\n", 200'000) + "x", "bad.yaml");
  expect_refusal(repeat("#\n", 100'000), "no hyper-parameters");
}

// yaml-cpp reads these escapes as a single byte.
TEST(HparamsHostile, EscapesThatAreNotText) {
  expect_refusal("layers: [4]\nstats_dir: \"a\\_b\"\n", "bad.yaml:2: text that is not UTF-8");
  expect_refusal("layers: [4]\n\"\\N\": 1\n", "bad.yaml:2: text that is not UTF-8");
}

TEST(HparamsHostile, DuplicateKeys) {
  expect_refusal("v_lr: 1\nlayers: [4]\nv_lr: 2\n", "bad.yaml:3: \"v_lr\" is given twice");
  expect_refusal("{\"v_lr\": 1,\n \"v_lr\": 2}", "bad.yaml:2: \"v_lr\" is given twice");
}

TEST(HparamsHostile, NotHyperParameters) {
  expect_refusal("", "empty");
  expect_refusal(" \n\t\n", "empty");
  expect_refusal("just words", "just words at the top");
  expect_refusal("- 1\n- 2\n", "[1, 2] at the top");
  expect_refusal("---\na: 1\n---\nb: 2\n", "a second document");
  expect_refusal("layers: [4]\nv_lr: !!python/object:os.system 1\n", "bad.yaml:2: the tag");
  expect_refusal("layers: [4\nv_lr: 1\n", "bad.yaml:2: bad YAML");
  expect_refusal("layers: [4]\n\tv_lr: 1\n", "bad.yaml:2");
  expect_refusal("{\"layers\": [4],\n\"v_lr\": 0.5,}", "bad.yaml:2: ");
  expect_refusal("{\"layers\": [4]", "syntax error");
  expect_refusal("{\"layers\": [4]} trailing", "syntax error");
  expect_refusal("{\"layers\": [4], \"v_lr\": 1e9999}", "bad.yaml:1");
  expect_refusal("layers: [4]\nv_lr: \xff\xfe\n", "bad.yaml:2: a byte that is not UTF-8");
  expect_refusal(std::string("layers: [4]\nv_lr: 0\0.5\n", 23), "bad.yaml:2: a NUL byte");
  expect_refusal("[a, b]: 1\n", "as a key");
  expect_refusal("{a: b}: 1\n", "bad.yaml:1");
}

TEST(HparamsHostile, FilesThatCannotBeRead) {
  EXPECT_THROW((void)load_hparams("/nonexistent/file.yaml"), Error);
  EXPECT_THROW((void)load_hparams("/"), Error);
  const auto path = std::filesystem::path(::testing::TempDir()) / "emend_hparams_huge.yaml";
  write_file(path, std::string(1'000'000, 'a'));
  EXPECT_THROW((void)load_hparams(path), Error);
  std::filesystem::remove(path);
}

}  // namespace hparams_hostile_test
}  // namespace emend::hparams
