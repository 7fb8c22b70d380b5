// What holds for every text: decoding gives it back, spans cover it, streaming equals decoding, and a text in one
// piece gives the same ids whatever the cache holds.
#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <gtest/gtest.h>

#include <random>

#include "support/random_text.h"
#include "support/shared.h"
#include "support/tiny_tokenizer.h"
#include "support/tokenizer_cases.h"

namespace emend::models {
namespace tokenizer_property_test {

using emend::testing::added_token;
using emend::testing::expect_cover;
using emend::testing::make_tokenizer;
using emend::testing::random_text;
using emend::testing::shared_dir;
using nlohmann::json;

void check(const Tokenizer& tokenizer, const std::string& text, bool reversible) {
  const Encoding encoding = tokenizer.encode(text);
  ASSERT_EQ(encoding.ids, tokenizer.encode_ids(text)) << text;
  expect_cover(encoding, text);
  const std::string decoded = tokenizer.decode(encoding.ids);
  if (reversible) {
    ASSERT_EQ(decoded, text);
  }
  StreamDecoder stream(tokenizer, false);
  std::string streamed;
  for (const int64_t id : encoding.ids) {
    const std::string part = stream.push(id);
    ASSERT_FALSE(first_invalid_utf8(part));
    streamed += part;
  }
  ASSERT_EQ(streamed + stream.finish(), decoded) << text;
}

TEST(TokenizerProperty, ByteLevel) {
  json document =
      emend::testing::byte_level_json({{"a", "b"}, {"t", "h"}, {"th", "e"}, {"Ġ", "Ġ"}, {"Ã", "©"}, {"Ì", "ģ"}});
  document["added_tokens"] = {added_token("<s>", 262), added_token("<|x|>", 263),
                              added_token("  ", 264, {{"special", false}})};
  const auto tokenizer = make_tokenizer(document);
  std::mt19937_64 random(1);
  for (int i = 0; i < 3000; ++i) check(*tokenizer, random_text(random), true);
}

TEST(TokenizerProperty, Composed) {
  json document = emend::testing::byte_level_json({{"a", "b"}, {"Ã", "©"}});
  document["normalizer"] = {{"type", "NFC"}};
  const auto tokenizer = make_tokenizer(document);
  std::mt19937_64 random(2);
  for (int i = 0; i < 3000; ++i) check(*tokenizer, random_text(random), false);
}

TEST(TokenizerProperty, ByteFallback) {
  const auto tokenizer =
      make_tokenizer(emend::testing::metaspace_json("abthe", {{"a", "b"}, {"t", "h"}, {"▁", "th"}, {"▁", "▁"}}));
  std::mt19937_64 random(3);
  // Each stretch between special tokens gets a prefix, ▁ itself and "<0x41>" are read back as what they stand for.
  for (int i = 0; i < 3000; ++i) check(*tokenizer, random_text(random), false);
}

TEST(TokenizerProperty, WordsApartAreWordsTogether) {
  // Cutting at ▁ and the cache of words are only a matter of speed: with a merge across words that never applies,
  // neither is used.
  const std::vector<std::pair<std::string, std::string>> merges = {
      {"a", "b"}, {"▁", "a"}, {"▁", "ab"}, {"b", "b"}, {"▁", "▁"}};
  auto across = merges;
  across.emplace_back("zz", "▁");
  json document = emend::testing::metaspace_json("abz", merges);
  json whole = document;
  whole["model"]["vocab"]["zz"] = 2000;
  whole["model"]["vocab"]["zz▁"] = 2001;
  whole["model"]["merges"].push_back(json::array({"zz", "▁"}));
  const auto cut = make_tokenizer(document), uncut = make_tokenizer(whole);
  std::mt19937_64 random(4);
  for (int i = 0; i < 3000; ++i) {
    std::string text;
    for (size_t n = random() % 60; n > 0; --n) text += std::string("abz  é\n")[random() % 8];
    if (first_invalid_utf8(text)) text = repair_utf8(text);
    ASSERT_EQ(cut->encode_ids(text), uncut->encode_ids(text)) << text;
  }
}

TEST(TokenizerProperty, RealVocabularies) {
  EMEND_NEEDS_SHARED();
  for (const char* name : {"gpt2", "llama3", "llama2", "phi3", "qwen2", "qwen_v1", "gpt_neox", "chatglm3"}) {
    const auto tokenizer = load_tokenizer(shared_dir() / "fixtures" / "tokenizers" / name);
    const bool reversible = std::string(name) == "gpt2" || std::string(name) == "llama3";
    std::mt19937_64 random(5);
    for (int i = 0; i < 500; ++i) check(*tokenizer, random_text(random), reversible);
  }
}

}  // namespace tokenizer_property_test
}  // namespace emend::models
