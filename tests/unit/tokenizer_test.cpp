// Encoding and decoding with small hand-made tokenizers; the expected ids follow from the rules by hand.
#include <emend/core/error.h>
#include <emend/models/chat.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <set>
#include <thread>

#include "support/tiny_tokenizer.h"

namespace emend::models {
namespace tokenizer_test {

using emend::testing::added_token;
using emend::testing::byte_level_json;
using emend::testing::make_tokenizer;
using emend::testing::metaspace_json;
using emend::testing::TemporaryFolder;
using nlohmann::json;
using Ids = std::vector<int64_t>;
using Offsets = std::vector<std::pair<size_t, size_t>>;

TEST(Tokenizer, MergesByRankThenFromLeftToRight) {
  // 256 "ab", 257 "bc", 258 "abc": "ab" comes first although "bc" could merge too.
  const auto tokenizer = make_tokenizer(byte_level_json({{"a", "b"}, {"b", "c"}, {"ab", "c"}}));
  EXPECT_EQ(tokenizer->encode_ids("abc"), (Ids{258}));
  EXPECT_EQ(tokenizer->encode_ids("bc"), (Ids{257}));
  EXPECT_EQ(tokenizer->encode_ids("abbc"), (Ids{256, 257}));
  const auto same = make_tokenizer(byte_level_json({{"a", "a"}}));
  EXPECT_EQ(same->encode_ids("aaa"), (Ids{256, 'a'}));
}

TEST(Tokenizer, LongWordsMergeLikeShortOnes) {
  // More symbols than the short-word algorithm takes: 100 times "aab" against one "aab".
  const auto tokenizer = make_tokenizer(byte_level_json({{"a", "a"}, {"aa", "b"}, {"aab", "aab"}}));
  std::string text;
  for (int i = 0; i < 100; ++i) text += "aab";
  const Ids ids = tokenizer->encode_ids(text);
  EXPECT_EQ(ids, Ids(50, 258));
  EXPECT_EQ(tokenizer->decode(ids), text);
  EXPECT_EQ(tokenizer->encode_ids("aabaab"), (Ids{258}));
}

TEST(Tokenizer, MergesMayBePairs) {
  json document = byte_level_json({{"a", "b"}});
  document["model"]["merges"] = json::array({json::array({"a", "b"})});
  EXPECT_EQ(make_tokenizer(document)->encode_ids("ab"), (Ids{256}));
}

TEST(Tokenizer, IgnoreMergesTakesWholeWords) {
  json document = byte_level_json({{"a", "b"}});
  document["model"]["vocab"]["abc"] = 300;
  EXPECT_EQ(make_tokenizer(document)->encode_ids("abc"), (Ids{256, 'c'}));
  document["model"]["ignore_merges"] = true;
  const auto tokenizer = make_tokenizer(document);
  EXPECT_EQ(tokenizer->encode_ids("abc"), (Ids{300}));
  EXPECT_EQ(tokenizer->encode_ids("abcd"), (Ids{256, 'c', 'd'}));
  EXPECT_EQ(tokenizer->vocab_size(), 301);
}

TEST(Tokenizer, OffsetsAreBytesOfTheText) {
  const auto tokenizer = make_tokenizer(byte_level_json({{"Ġ", "b"}, {"Ã", "©"}}));
  const Encoding encoding = tokenizer->encode("a bé🙂");
  EXPECT_EQ(encoding.ids, (Ids{'a', 256, 257, 0xF0, 0x9F, 0x99, 0x82}));
  EXPECT_EQ(encoding.offsets, (Offsets{{0, 1}, {1, 3}, {3, 5}, {5, 6}, {6, 7}, {7, 8}, {8, 9}}));
  EXPECT_EQ(encoding.span(2).begin, 3u);
  EXPECT_EQ(tokenizer->decode(encoding.ids), "a bé🙂");
  EXPECT_EQ(tokenizer->token_text(256), "Ġb");
  EXPECT_EQ(tokenizer->token_bytes(256), " b");
}

TEST(Tokenizer, OffsetsSurviveComposition) {
  json document = byte_level_json({{"Ã", "©"}});
  document["normalizer"] = {{"type", "NFC"}};
  const auto tokenizer = make_tokenizer(document);
  const Encoding encoding = tokenizer->encode("xe\xCC\x81y");  // e + U+0301, three bytes, composes to é
  EXPECT_EQ(encoding.ids, (Ids{'x', 256, 'y'}));
  EXPECT_EQ(encoding.offsets, (Offsets{{0, 1}, {1, 4}, {4, 5}}));
  // é split into bytes: both stand for the whole composed character.
  const auto bytes = make_tokenizer([] {
    json plain = byte_level_json();
    plain["normalizer"] = {{"type", "NFC"}};
    return plain;
  }());
  EXPECT_EQ(bytes->encode("e\xCC\x81").offsets, (Offsets{{0, 3}, {0, 3}}));
  // Hangul: three jamo become one syllable.
  EXPECT_EQ(bytes->decode(bytes->encode_ids("\u1100\u1161\u11A8")), "\uAC01");
}

TEST(Tokenizer, AddedTokensTakeTheLongestMatch) {
  json document = byte_level_json();
  document["added_tokens"] = {added_token("<a>", 256), added_token("<a><b>", 257), added_token("<x", 258)};
  const auto tokenizer = make_tokenizer(document);
  EXPECT_EQ(tokenizer->encode_ids("<a><b><a><x<"), (Ids{257, 256, 258, '<'}));
  EXPECT_EQ(tokenizer->encode("x<a>y").offsets, (Offsets{{0, 1}, {1, 4}, {4, 5}}));
  EXPECT_EQ(tokenizer->token_id("<a><b>"), 257);
  EXPECT_TRUE(tokenizer->is_special(256));
  EXPECT_EQ(tokenizer->decode(Ids{'x', 256, 'y'}), "x<a>y");
  EXPECT_EQ(tokenizer->decode(Ids{'x', 256, 'y'}, true), "xy");
}

TEST(Tokenizer, AddedTokensStripAndStandAlone) {
  json document = byte_level_json();
  document["added_tokens"] = {added_token("<l>", 256, {{"lstrip", true}}), added_token("<r>", 257, {{"rstrip", true}}),
                              added_token("word", 258, {{"single_word", true}})};
  const auto tokenizer = make_tokenizer(document);
  EXPECT_EQ(tokenizer->encode_ids("a \n<l>b"), (Ids{'a', 256, 'b'}));
  EXPECT_EQ(tokenizer->encode("a \n<l>b").offsets, (Offsets{{0, 1}, {1, 6}, {6, 7}}));
  EXPECT_EQ(tokenizer->encode_ids("a<r>\u00A0 b"), (Ids{'a', 257, 'b'}));
  EXPECT_EQ(tokenizer->encode_ids("<r> <l>"), (Ids{257, 256}));
  EXPECT_EQ(tokenizer->encode_ids("a word."), (Ids{'a', ' ', 258, '.'}));
  EXPECT_EQ(tokenizer->encode_ids("words").size(), 5u);
  document["added_tokens"] = {added_token("\n", 256, {{"lstrip", true}, {"rstrip", true}})};
  EXPECT_EQ(make_tokenizer(document)->encode_ids("a\n\n\nb"), (Ids{'a', 256, 'b'})) << "the first takes the others";
  EXPECT_EQ(tokenizer->encode_ids("éword").size(), 6u);
}

TEST(Tokenizer, NormalisedAddedTokensAreFoundAfterNormalisation) {
  json document = byte_level_json();
  document["normalizer"] = {{"type", "NFC"}};
  document["added_tokens"] = {added_token("né", 256, {{"normalized", true}, {"special", false}}),
                              added_token("me", 257)};
  const auto tokenizer = make_tokenizer(document);
  EXPECT_EQ(tokenizer->encode_ids("né"), (Ids{256}));
  EXPECT_EQ(tokenizer->encode_ids("ne\xCC\x81"), (Ids{256}));
  EXPECT_EQ(tokenizer->encode("xne\xCC\x81").offsets, (Offsets{{0, 1}, {1, 5}}));
  // The raw search finds "me" before normalisation could compose its e.
  EXPECT_EQ(tokenizer->encode_ids("me\xCC\x81").front(), 257);
}

TEST(Tokenizer, ByteFallbackAndUnknown) {
  const auto tokenizer = make_tokenizer(metaspace_json("helo", {{"l", "l"}, {"▁", "h"}}));
  // 260 h, 261 e, 262 l, 263 o, 264 ll, 265 ▁h
  const Encoding encoding = tokenizer->encode("hello é", true);
  EXPECT_EQ(encoding.ids, (Ids{1, 265, 261, 264, 263, 259, 3 + 0xC3, 3 + 0xA9}));
  EXPECT_EQ(encoding.offsets, (Offsets{{0, 0}, {0, 1}, {1, 2}, {2, 4}, {4, 5}, {5, 6}, {6, 7}, {7, 8}}));
  EXPECT_EQ(tokenizer->decode(encoding.ids), "<s> hello é");
  EXPECT_EQ(tokenizer->decode(encoding.ids, true), "hello é");
  EXPECT_EQ(tokenizer->prefix_ids(), (Ids{1}));

  json without_bytes = metaspace_json("helo");
  for (auto it = without_bytes["model"]["vocab"].begin(); it != without_bytes["model"]["vocab"].end();)
    it = it.key().size() == 6 ? without_bytes["model"]["vocab"].erase(it) : std::next(it);
  // Two unknown characters fuse into one <unk> that covers both.
  const Encoding unknown = make_tokenizer(without_bytes)->encode("hxyo");
  EXPECT_EQ(unknown.ids, (Ids{259, 260, 0, 263}));
  EXPECT_EQ(unknown.offsets, (Offsets{{0, 0}, {0, 1}, {1, 3}, {3, 4}}));
}

TEST(Tokenizer, MetaspaceCutsChangeNothing) {
  // One merge reaches across words, so that this tokenizer must not be cut; the other may be.
  const std::vector<std::pair<std::string, std::string>> inside = {{"▁", "a"}, {"b", "a"}, {"▁", "▁"}};
  auto across = inside;
  across.emplace_back("a", "▁");
  const auto cut = make_tokenizer(metaspace_json("ab", inside)), whole = make_tokenizer(metaspace_json("ab", across));
  EXPECT_EQ(cut->encode_ids("a  ba a"), (Ids{262, 264, 263, 262}));
  EXPECT_EQ(cut->encode_ids("aa b"), (Ids{262, 260, 259, 261}));
  EXPECT_EQ(whole->encode_ids("aa b"), (Ids{262, 265, 261}));
}

TEST(Tokenizer, MetaspacePreTokenizer) {
  json document = metaspace_json("ab", {{"▁", "a"}, {"▁", "b"}});
  document["normalizer"] = nullptr;
  document["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "first"}, {"split", true}};
  document["decoder"] = {{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "first"}};
  const auto tokenizer = make_tokenizer(document);
  const Encoding encoding = tokenizer->encode("a b</s>b");
  EXPECT_EQ(encoding.ids, (Ids{262, 263, 2, 261}));
  EXPECT_EQ(encoding.offsets, (Offsets{{0, 1}, {1, 3}, {3, 7}, {7, 8}}));
  EXPECT_EQ(tokenizer->decode(encoding.ids, true), "a bb");
}

TEST(Tokenizer, RulesThatDoubleATextAreRefused) {
  json document = metaspace_json("a");
  json doubling = json::array();
  for (int i = 0; i < 40; ++i)
    doubling.push_back({{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}});
  document["normalizer"] = {{"type", "Sequence"}, {"normalizers", doubling}};
  const auto refused = [](const auto& work, const std::string& part) {
    try {
      work();
      ADD_FAILURE() << "2⁴⁰ bytes";
    } catch (const Error& error) {
      EXPECT_EQ(error.error_class(), ErrorClass::kUnsupported);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused([&] { (void)make_tokenizer(document)->encode("a"); }, "normalizer: rules that make more than");
  document = metaspace_json("a");
  document["decoder"] = {{"type", "Sequence"}, {"decoders", doubling}};
  const auto tokenizer = make_tokenizer(document);
  const auto ids = tokenizer->encode_ids("aaaa");
  refused([&] { (void)tokenizer->decode(ids); }, "decoder: rules that make more than");
  refused([&] { (void)tokenizer->token_bytes(ids.back(), false); }, "decoder: rules that make more than");
}

TEST(Tokenizer, TemplateWithSuffix) {
  json document = metaspace_json("a");
  document["post_processor"]["single"] = {
      {{"SpecialToken", {{"id", "<s>"}}}}, {{"Sequence", {{"id", "A"}}}}, {{"SpecialToken", {{"id", "<s>"}}}}};
  const Encoding encoding = make_tokenizer(document)->encode("a", true);
  EXPECT_EQ(encoding.ids, (Ids{1, 259, 260, 1}));
  EXPECT_EQ(encoding.offsets.back(), (std::pair<size_t, size_t>{1, 1}));
}

TEST(Tokenizer, EmptyAndNulTexts) {
  const auto tokenizer = make_tokenizer(byte_level_json());
  EXPECT_TRUE(tokenizer->encode_ids("").empty());
  const std::string text("a\0b", 3);
  EXPECT_EQ(tokenizer->encode_ids(text), (Ids{'a', 0, 'b'}));
  EXPECT_EQ(tokenizer->decode(Ids{'a', 0, 'b'}), text);
  EXPECT_EQ(tokenizer->decode(Ids{}), "");
  EXPECT_EQ(make_tokenizer(metaspace_json("a"))->encode_ids("", true), (Ids{1}));
}

TEST(Tokenizer, DecodingIsAlwaysValid) {
  const auto tokenizer = make_tokenizer(byte_level_json());
  EXPECT_EQ(tokenizer->decode(Ids{'a', 0xE2, 0x82, 'b'}), "a\uFFFDb");
  EXPECT_EQ(tokenizer->decode(Ids{0xFF, 0xFE}), "\uFFFD\uFFFD");
  EXPECT_EQ(tokenizer->decode(Ids{'a', 5000, 'b'}), "ab");  // a row of the model without a token
  EXPECT_THROW((void)tokenizer->decode(Ids{-1}), Error);
  const auto fallback = make_tokenizer(metaspace_json("a"));
  EXPECT_EQ(fallback->decode(Ids{259, 260, 3 + 0xC3, 3 + 0xA9}), "aé");
  EXPECT_EQ(fallback->decode(Ids{3 + 0xC3, 260}), "\uFFFDa");
}

TEST(Tokenizer, InvalidTextNamesTheByte) {
  const auto tokenizer = make_tokenizer(byte_level_json());
  for (const std::string text : {"abc\xFF", "abc\xC3", "abc\xED\xA0\x80", "abc\xC0\x80", "abc\xF4\x90\x80\x80"}) {
    try {
      (void)tokenizer->encode(text);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.error_class(), ErrorClass::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("byte 3"), std::string::npos) << error.what();
    }
  }
}

TEST(Tokenizer, StreamsWholeCharacters) {
  const auto tokenizer = make_tokenizer(byte_level_json());
  StreamDecoder stream(*tokenizer);
  EXPECT_EQ(stream.push('a'), "a");
  EXPECT_EQ(stream.push(0xF0), "");
  EXPECT_EQ(stream.push(0x9F), "");
  EXPECT_EQ(stream.push(0x99), "");
  EXPECT_EQ(stream.push(0x82), "🙂");
  EXPECT_EQ(stream.push(0xC3), "");
  EXPECT_EQ(stream.push('x'), "\uFFFDx");
  EXPECT_EQ(stream.push(0xE2), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  EXPECT_EQ(stream.finish(), "");

  const auto fallback = make_tokenizer(metaspace_json("ab"));
  StreamDecoder words(*fallback);
  std::string text;
  for (const int64_t id : fallback->encode_ids("ab é b", true)) text += words.push(id);
  EXPECT_EQ(text + words.finish(), "ab é b");
}

TEST(Tokenizer, FingerprintCoversWhatDecidesIds) {
  const json base = byte_level_json({{"a", "b"}, {"b", "c"}});
  std::set<std::string> seen = {make_tokenizer(base)->fingerprint()};
  EXPECT_EQ(make_tokenizer(base)->fingerprint(), *seen.begin());
  EXPECT_EQ(seen.begin()->size(), 64u);
  const auto changed = [&](const std::function<void(json&)>& change) {
    json document = base;
    change(document);
    EXPECT_TRUE(seen.insert(make_tokenizer(document)->fingerprint()).second) << document["model"]["merges"];
  };
  changed([](json& j) { std::swap(j["model"]["merges"][0], j["model"]["merges"][1]); });
  changed([](json& j) { std::swap(j["model"]["vocab"]["ab"], j["model"]["vocab"]["bc"]); });
  changed([](json& j) { j["model"]["ignore_merges"] = true; });
  changed([](json& j) { j["normalizer"] = {{"type", "NFC"}}; });
  changed([](json& j) { j["pre_tokenizer"]["use_regex"] = false; });
  changed([](json& j) { j["added_tokens"] = json::array({added_token("<a>", 258)}); });
  changed([](json& j) { j["added_tokens"] = json::array({added_token("<a>", 258, {{"lstrip", true}})}); });
}

TEST(Chat, FormatsAreToldApart) {
  const auto turns = [](const char* chat_template) {
    return render_chat(detect_chat_format(chat_template), {{"user", "Hi"}}, true).text;
  };
  EXPECT_EQ(turns("{{ '<|im_start|>' + role + '<|im_sep|>' + content + '<|im_end|>' }}"),
            "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>");
  EXPECT_EQ(turns("{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"),
            "<|user|>Hi<|end|><|assistant|>");
  EXPECT_EQ(turns("{{ '<|user|>\\n' + content + '<|end|>\\n' }}"), "<|user|>\nHi<|end|>\n<|assistant|>\n");
  EXPECT_EQ(
      turns("{{ \"<|im_start|>system\\nYou're {a} helper+<|im_end|>\\n\" }}"),
      "<|im_start|>system\nYou're {a} helper+<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(turns("{{ '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}"),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
}

TEST(Chat, WhatDiffersAmongTemplatesOfAFormatIsReadFromThem) {
  const ChatTokens tokens{"<b>", "<e>"};
  const auto turns = [&](const char* chat_template, bool system = false) {
    std::vector<ChatMessage> messages = {{"user", "Hi"}, {"assistant", "Yes"}, {"user", "So"}};
    if (system) messages.insert(messages.begin(), {"system", "Be"});
    return render_chat(detect_chat_format(chat_template, tokens), messages, true).text;
  };
  EXPECT_EQ(turns("{{ bos_token }}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'}}"),
            "<b><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\nSo<|im_end|>\n"
            "<|im_start|>assistant\n");
  EXPECT_EQ(turns("{{ '<|user|>\\n' + message['content'] + eos_token }}{{ '<|assistant|>' }}"),
            "<|user|>\nHi<e>\n<|assistant|>\nYes<e>\n<|user|>\nSo<e>\n<|assistant|>\n");
  EXPECT_EQ(turns("{{ '<|user|>\\n' + message['content'] + '\\n' }}{{ '<|assistant|>\\n' + m + eos_token }}"),
            "<|user|>\nHi\n<|assistant|>\nYes<e>\n<|user|>\nSo\n<|assistant|>\n");
  EXPECT_EQ(turns("{{ bos_token }}{{ \" [INST] \" + c + \" [/INST]\" }}{{ \" \" + message + eos_token }}"),
            "<b> [INST] Hi [/INST] Yes<e> [INST] So [/INST]");
  EXPECT_EQ(turns("{{ bos_token }}{{ \"[INST] \" + c + \"[/INST]\" }}{{ \" \" + message + eos_token }}"),
            "<b>[INST] Hi[/INST] Yes<e>[INST] So[/INST]");
  EXPECT_EQ(turns("{{ bos_token }}{{ '[INST] ' + c + ' [/INST]' }}{{ c + eos_token + ' ' }}"),
            "<b>[INST] Hi [/INST]Yes<e> [INST] So [/INST]");
  EXPECT_EQ(turns("{{ bos_token }}{{ '[INST] ' + c + ' [/INST]' }}{{ c + eos_token }}"),
            "<b>[INST] Hi [/INST]Yes<e>[INST] So [/INST]");
  const std::string llama = "{{ '<|start_header_id|>' }}{{ \"Cutting Knowledge Date: December 2023\\n\" }}";
  const std::string fixed = llama + "{%- set date_string = \"26 Jul 2024\" %}";
  const std::string dates =
      "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
      "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n";
  EXPECT_TRUE(turns(fixed.c_str()).starts_with(dates + "<|eot_id|><|start_header_id|>user")) << turns(fixed.c_str());
  EXPECT_TRUE(turns(fixed.c_str(), true).starts_with(dates + "Be<|eot_id|>")) << turns(fixed.c_str(), true);
  const std::string now = turns((llama + "{{ strftime_now('%d %b %Y') }}").c_str());
  EXPECT_EQ(now.find("26 Jul 2024"), std::string::npos) << now;
  EXPECT_NE(now.find("Today Date: "), std::string::npos) << now;
}

TEST(Tokenizer, ThreadsShareOneTokenizer) {
  const auto tokenizer = make_tokenizer(byte_level_json({{"a", "b"}, {"Ġ", "ab"}, {"b", "b"}}));
  std::vector<std::string> texts;
  std::vector<Ids> expected;
  for (int i = 0; i < 200; ++i) {
    texts.push_back("ab " + std::to_string(i * 7919) + " abb ab" + std::string(static_cast<size_t>(i % 40), 'b'));
    expected.push_back(
        make_tokenizer(byte_level_json({{"a", "b"}, {"Ġ", "ab"}, {"b", "b"}}))->encode_ids(texts.back()));
    if (i >= 20) expected.back() = tokenizer->encode_ids(texts.back());
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round)
        for (size_t i = 0; i < texts.size(); ++i) wrong += tokenizer->encode_ids(texts[i]) != expected[i];
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace tokenizer_test
}  // namespace emend::models
