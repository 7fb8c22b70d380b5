// The parts of the tokenizer: patterns, splitting, Unicode, added tokens, the cache of words.
#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/added_tokens.h>
#include <emend/models/tokenizer/detail/bpe.h>
#include <emend/models/tokenizer/detail/regex.h>
#include <emend/models/tokenizer/detail/steps.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <gtest/gtest.h>

namespace emend::models::detail {
namespace tokenizer_parts_test {

using nlohmann::json;
using Words = std::vector<std::string>;

Words words_of(const json& pre_tokenizer, const std::string& text) {
  const PreTokenizerChain chain = make_pre_tokenizers({pre_tokenizer, "test", "pre_tokenizer"});
  Words words;
  pre_tokenise(chain, {text}, [&words](const Piece& piece) { words.emplace_back(piece.text); });
  return words;
}

Words split(const json& pattern, const std::string& behaviour, const std::string& text, bool invert = false) {
  return words_of({{"type", "Split"}, {"pattern", pattern}, {"behavior", behaviour}, {"invert", invert}}, text);
}

Words matches(const std::string& pattern, const std::string& text) {
  const Regex regex(pattern, "test");
  Regex::Scan scan(regex, text);
  Words found;
  for (size_t begin = 0, end = 0; scan.next(begin, end);) found.push_back(text.substr(begin, end - begin));
  return found;
}

TEST(TokenizerSplit, Behaviours) {
  const json dash = {{"String", "-"}};
  const std::string text = "the-final--countdown";
  EXPECT_EQ(split(dash, "Removed", text), (Words{"the", "final", "countdown"}));
  EXPECT_EQ(split(dash, "Isolated", text), (Words{"the", "-", "final", "-", "-", "countdown"}));
  EXPECT_EQ(split(dash, "MergedWithPrevious", text), (Words{"the-", "final-", "-", "countdown"}));
  EXPECT_EQ(split(dash, "MergedWithNext", text), (Words{"the", "-final", "-", "-countdown"}));
  EXPECT_EQ(split(dash, "Contiguous", text), (Words{"the", "-", "final", "--", "countdown"}));
  EXPECT_EQ(split(dash, "MergedWithPrevious", "--a-"), (Words{"-", "-", "a-"}));
  EXPECT_EQ(split(dash, "MergedWithNext", "--a-"), (Words{"-", "-a", "-"}));
  EXPECT_EQ(split(dash, "Removed", text, true), (Words{"-", "-", "-"}));
  EXPECT_EQ(split({{"String", ""}}, "Isolated", "ab"), (Words{"ab"}));
  EXPECT_EQ(split({{"Regex", "x*"}}, "Isolated", "axxb"), (Words{"a", "xx", "b"}));
}

TEST(TokenizerSplit, CharacterClasses) {
  EXPECT_EQ(words_of({{"type", "Digits"}, {"individual_digits", true}}, "a12½"), (Words{"a", "1", "2", "½"}));
  EXPECT_EQ(words_of({{"type", "Digits"}, {"individual_digits", false}}, "a12½b"), (Words{"a", "12½", "b"}));
  EXPECT_EQ(words_of({{"type", "Punctuation"}, {"behavior", "Contiguous"}}, "a,$。b"), (Words{"a", ",$。", "b"}));
  EXPECT_EQ(words_of({{"type", "WhitespaceSplit"}}, " a\u00A0b\n"), (Words{"a", "b"}));
  EXPECT_EQ(words_of({{"type", "Whitespace"}}, "don't stop"), (Words{"don", "'", "t", "stop"}));
  // \w of Rust: joiners belong to words, raised digits and fractions do not.
  EXPECT_EQ(words_of({{"type", "Whitespace"}}, "a\u200Db c\u00B2\u00BD"), (Words{"a\u200Db", "c", "\u00B2\u00BD"}));
}

TEST(TokenizerSplit, ByteLevel) {
  const json step = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"use_regex", true}};
  EXPECT_EQ(words_of(step, "it's  1st"), (Words{" it", "'s", " ", " 1", "st"}));
  // Not the last step: the characters themselves come out.
  const json sequence = {{"type", "Sequence"}, {"pretokenizers", {step, {{"type", "Digits"}}}}};
  EXPECT_EQ(words_of(sequence, "a1é"), (Words{"Ġa", "1", "Ã©"}));
  EXPECT_EQ(from_byte_level(to_byte_level("é \n\xFF")), "é \n\xFF");
  EXPECT_EQ(from_byte_level("日"), "日");
}

TEST(TokenizerRegex, OnigurumaSyntax) {
  EXPECT_EQ(matches(R"(\h+)", "xyz 12aF g"), (Words{"12aF"}));
  EXPECT_EQ(matches(R"([\h]+)", "a\tb"), (Words{"a", "b"}));
  EXPECT_EQ(matches(R"(\w+)", "a\u0301b ²③"), (Words{"a\u0301b", "²"}));
  EXPECT_EQ(matches(R"(\u0041+)", "xAA"), (Words{"AA"}));
  EXPECT_EQ(matches(R"(\p{N}{1,3}+|x)", "1234567x"), (Words{"1234567", "x"}));
  EXPECT_EQ(matches(R"(a|[b-c]{2}+)", "abcbcb"), (Words{"a", "bcbc"}));
  EXPECT_EQ(matches(R"(\p{N}{1,3})", "1234"), (Words{"123", "4"}));
  EXPECT_EQ(matches(R"((?:ab|(c)){1,2}+)", "ababab cc"), (Words{"ababab", "cc"}));
  EXPECT_EQ(matches(R"(é{2}+)", "ééé"), (Words{"éé"}));
  EXPECT_EQ(matches(R"(\x{41}+)", "xAA"), (Words{"AA"}));
  EXPECT_EQ(matches(R"((?m:a.b))", "a\nb"), (Words{"a\nb"}));
  EXPECT_EQ(matches("a.b", "a\nb"), (Words{}));
  EXPECT_EQ(matches("^b", "a\nb"), (Words{"b"}));
  EXPECT_EQ(matches(R"( ?[^(\s|[.,!?…。，、।۔،])]+)", "Hi, (you) there"), (Words{"Hi", "you", " there"}));
  EXPECT_EQ(matches(R"([[:digit:]]+)", "a12"), (Words{"12"}));
  EXPECT_EQ(matches(R"([]a]+)", "x]a"), (Words{"]a"}));
  EXPECT_EQ(matches(R"(\p{Han}+)", "漢字、かな"), (Words{"漢字"}));
  EXPECT_EQ(matches(R"(\s+)", "a\u180Eb"), (Words{}));                       // no white space since Unicode 6.3
  EXPECT_EQ(matches(R"(\p{L}+)", "a\U00031350b"), (Words{"a\U00031350b"}));  // a letter since Unicode 15
  EXPECT_EQ(matches("a|", "ba"), (Words{"", "a"}));
}

TEST(TokenizerRegex, RefusesWhatItCannotRead) {
  const auto refusal = [](const std::string& pattern) {
    try {
      const Regex regex(pattern, "file: key \"k\"");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  for (const char* pattern : {"(", "[a", "a{2", "*", "[a&&b]", "[a[^b]]", "[\\W]", "\\p{Nonsense}", "(?P<", "\\"}) {
    const std::string message = refusal(pattern);
    if (std::string(pattern) == "a{2") continue;  // a literal brace is allowed
    EXPECT_EQ(message.rfind("file: key \"k\": ", 0), 0u) << pattern << " → " << message;
  }
  EXPECT_NE(refusal(std::string(200'000, '(')), "accepted");
  EXPECT_LT(refusal(std::string(200'000, '(')).size(), 600u);
  EXPECT_NE(refusal(std::string(100, '[')), "accepted");
}

TEST(TokenizerRegex, RunawayPatternsStop) {
  std::string text(5000, 'a');
  text.push_back('b');
  for (const char* pattern : {"(a+)+$", "(a|aa)+c", "(?:a*)*c", "^(?:(a?)\\1?)*c"}) {
    const Regex regex(pattern, "test");
    Regex::Scan scan(regex, text);
    size_t begin = 0, end = 0;
    try {
      while (scan.next(begin, end)) {
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.error_class(), ErrorClass::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("gave up"), std::string::npos) << error.what();
    }
  }
}

TEST(TokenizerUnicode, Utf8) {
  EXPECT_FALSE(first_invalid_utf8("aé漢🙂 and more than eight bytes"));
  EXPECT_EQ(first_invalid_utf8("eight bytes\xE2\x82"), 11u);
  EXPECT_EQ(repair_utf8("a\xE2\x82z\xFF\xF0\x9F\x99\x82"), "a\uFFFDz\uFFFD🙂");
  EXPECT_EQ(repair_utf8("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(incomplete_tail("a\xE2\x82"), 2u);
  EXPECT_EQ(incomplete_tail("a\xF0\x9F\x99"), 3u);
  EXPECT_EQ(incomplete_tail("€"), 0u);
  EXPECT_EQ(incomplete_tail("\xFF"), 0u);
  EXPECT_EQ(incomplete_tail("\xE0\x80"), 0u);  // overlong: no character begins so
  for (const char32_t c : {U'a', U'é', U'漢', U'🙂', U'\U0010FFFF'}) {
    std::string text;
    append_utf8(text, c);
    EXPECT_EQ(decode_utf8(text.data()), c);
    EXPECT_EQ(utf8_length(text[0]), text.size());
  }
}

TEST(TokenizerUnicode, FormsWithOrigins) {
  const auto apply = [](const Normalizer& form, const std::string& text) {
    PieceBuilder builder;
    return form({text}, builder) ? std::string(builder.piece().text) : text;
  };
  const auto nfc = make_unicode_form(true, false, ComposeTables::kUnicode);
  const auto nfd = make_unicode_form(false, false, ComposeTables::kUnicode);
  const auto nfkc = make_unicode_form(true, true, ComposeTables::kUnicode);
  EXPECT_EQ(apply(nfc, "a\u0323\u0301"), "\u1EA1\u0301");
  EXPECT_EQ(apply(nfc, "\u212B"), "\u00C5");
  EXPECT_EQ(apply(nfd, "\u1EA1"), "a\u0323");
  EXPECT_EQ(apply(nfkc, "ﬁ①Å"), "fi1Å");
  EXPECT_EQ(apply(nfkc, "\uFF76\uFF9E"), "\u30AC");  // halfwidth ka and voicing mark
  EXPECT_EQ(apply(nfc, "plain"), "plain");
  // A mark newer than the reference's tables stays where it is only for the reference.
  const std::string recent = "a\u1AC5\u0327";
  EXPECT_EQ(apply(make_unicode_form(true, false, ComposeTables::kReference), recent), recent);
  EXPECT_NE(apply(nfc, recent), recent);
}

TEST(TokenizerParts, SearchCoversTheText) {
  AddedTokenSearch search;
  for (const char* content : {"  ", "    ", "ab", "abcd", "b"}) {
    AddedToken token;
    token.content = content;
    token.id = static_cast<uint32_t>(token.content.size() * 100 + static_cast<unsigned char>(content[0]));
    search.add(content, token);
  }
  std::vector<AddedSpan> spans;
  const std::string text = "abc     abcdb ";
  search.split(text, spans);
  std::string joined;
  Words tokens;
  for (const AddedSpan& span : spans) {
    EXPECT_EQ(span.begin, joined.size());
    joined += text.substr(span.begin, span.end - span.begin);
    if (span.token) tokens.push_back(span.token->content);
  }
  EXPECT_EQ(joined, text);
  EXPECT_EQ(tokens, (Words{"ab", "    ", "abcd", "b"}));
}

TEST(TokenizerParts, VocabularyFindsEveryPiece) {
  Vocabulary vocabulary;
  for (uint32_t id = 0; id < 5000; ++id) vocabulary.add("piece" + std::to_string(id * 31), id * 3);
  vocabulary.add("piece0", 9);       // id 9 has a piece already
  vocabulary.add("piece31", 20000);  // a repeated piece keeps its first id
  EXPECT_EQ(vocabulary.size(), 5000u);
  EXPECT_EQ(vocabulary.id_end(), 20001u);
  for (uint32_t id = 0; id < 5000; ++id) ASSERT_EQ(vocabulary.find("piece" + std::to_string(id * 31)), id * 3);
  EXPECT_EQ(vocabulary.find("piece1"), kNoToken);
  EXPECT_EQ(vocabulary.find(""), kNoToken);
  EXPECT_EQ(vocabulary.piece(9), "piece93");
  EXPECT_EQ(vocabulary.piece(10), std::nullopt);
  EXPECT_EQ(vocabulary.piece(20000), "piece31");
}

TEST(TokenizerParts, CacheKeepsShortWords) {
  const WordCache cache;
  std::vector<WordToken> out;
  const WordToken tokens[] = {{7, 0, 2}, {8, 2, 5}};
  cache.store("abcde", tokens);
  EXPECT_TRUE(cache.find("abcde", out));
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].id, 8u);
  EXPECT_EQ(out[1].begin, 2u);
  EXPECT_EQ(out[1].end, 5u);
  EXPECT_FALSE(cache.find("abcdf", out));
  EXPECT_FALSE(cache.find("", out));
  const WordToken gap[] = {{7, 0, 2}, {8, 3, 5}};  // a character that no token stands for
  cache.store("fghij", gap);
  out.clear();
  ASSERT_TRUE(cache.find("fghij", out));
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].begin, 3u);
  const std::string longest(WordCache::kMaxKey, 'x'), longer(WordCache::kMaxKey + 1, 'x');
  const WordToken one[] = {{9, 0, WordCache::kMaxKey}};
  for (const auto& word : {longest, longer}) cache.store(word, one);
  EXPECT_TRUE(cache.find(longest, out));
  EXPECT_FALSE(cache.find(longer, out));
  size_t kept = 0;
  for (size_t i = 0; i < 2 * WordCache::kSlots; ++i) {
    cache.store(std::to_string(i), tokens);  // the newer word stays
    ASSERT_TRUE(cache.find(std::to_string(i), out));
  }
  for (size_t i = 0; i < 2 * WordCache::kSlots; ++i) kept += cache.find(std::to_string(i), out);
  EXPECT_LE(kept, WordCache::kSlots);
}

}  // namespace tokenizer_parts_test
}  // namespace emend::models::detail
