// Encoding and decoding with small hand-made tokenizers; the expected ids follow from the rules by hand.
#include <emend/core/error.h>
#include <emend/models/chat.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <set>
#include <thread>

#include "support/error_of.h"
#include "support/shared.h"
#include "support/tiny_tokenizer.h"

namespace emend::models {
namespace tokenizer_test {

using emend::testing::added_token;
using emend::testing::byte_level_json;
using emend::testing::error_of;
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
  const auto refused = [](const std::function<void()>& work, const std::string& part) {
    const std::string message = error_of(work, ErrorClass::kUnsupported);
    EXPECT_NE(message.find(part), std::string::npos) << message;
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

TEST(Tokenizer, FlagsCountBesideVocabularyAndMerges) {
  const TemporaryFolder folder("emend-vocabulary");
  folder.write("vocab.json", R"({"a": 0, "b": 1, "ab": 2, "<s>": 3, "</s>": 4})");
  folder.write("merges.txt", "#version: 0.2\na b\n");
  const auto around = [&](const std::string& flags) {
    folder.write("tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": "</s>")" + flags + "}");
    return load_tokenizer(folder.path())->encode_ids("ab", true);
  };
  EXPECT_EQ(around(""), (Ids{2}));
  EXPECT_EQ(around(R"(, "add_bos_token": true)"), (Ids{3, 2}));
  EXPECT_EQ(around(R"(, "add_bos_token": true, "add_eos_token": true)"), (Ids{3, 2, 4}));
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
    const std::string message = error_of([&] { (void)tokenizer->encode(text); }, ErrorClass::kInvalidArgument);
    EXPECT_NE(message.find("byte 3"), std::string::npos) << message;
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

// What a model writes behind a prompt keeps the space of its first word.
TEST(Tokenizer, GoesOnWithASpace) {
  const auto tokenizer = make_tokenizer(metaspace_json("ab"));
  const Ids ids = tokenizer->encode_ids("ab é b");
  EXPECT_EQ(tokenizer->decode(ids), "ab é b");
  EXPECT_EQ(tokenizer->decode_more(ids), " ab é b");
  EXPECT_EQ(tokenizer->decode_more(Ids{ids.back()}), "b");
  StreamDecoder stream(*tokenizer, /*skip_special=*/true, /*at_start=*/false);
  std::string text;
  for (const int64_t id : ids) text += stream.push(id);
  EXPECT_EQ(text, " ab é b");
  EXPECT_EQ(tokenizer->decode_each(tokenizer->encode_ids("ab b", true)),
            (std::vector<std::string>{"<s>", "", "a", "b", " ", "b"}));
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

// A template as Qwen's: thoughts of earlier answers are left out, and an answer's are asked for.
constexpr const char* kThinking =
    "{%- for m in messages %}{%- set c = m.content %}{%- if m.role == 'assistant' and not loop.last %}"
    "{%- set c = c.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}";
// As Gemma's and Mistral's: turns take turns, and there is no place for a system message.
constexpr const char* kStrict =
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}";

std::vector<std::string> replies_of(const RenderedChat& chat) {
  std::vector<std::string> all;
  for (const auto& [begin, end] : chat.replies) all.push_back(chat.text.substr(begin, end - begin));
  return all;
}

TEST(Chat, ATemplateIsRenderedAsItSays) {
  const auto format = detect_chat_format(kStrict, {"<b>", "<e>"});
  EXPECT_EQ(format.name, "template");
  EXPECT_EQ(format.reply_close, "<e>");
  const std::vector<ChatMessage> messages = {{"user", "Hi "}, {"assistant", "Yes"}, {"user", "So"}};
  EXPECT_EQ(render_chat(format, messages, true).text, "<b>[INST] Hi [/INST] Yes<e>[INST] So [/INST]");
  EXPECT_EQ(
      render_chat(detect_chat_format("{{ bos_token is defined }}{{ tools is none }}", {"", ""}), messages, true).text,
      "FalseTrue");
}

TEST(Chat, ASystemTextJoinsTheFirstTurnWhereATemplateRefusesIt) {
  const auto format = detect_chat_format(kStrict, {"<b>", "<e>"});
  const auto chat = render_chat(format, {{"system", "Be brief."}, {"user", "Hi"}, {"assistant", "Yes"}}, false);
  EXPECT_EQ(chat.text, "<b>[INST] Be brief.\n\nHi [/INST] Yes<e>");
  EXPECT_EQ(replies_of(chat), (std::vector<std::string>{" Yes<e>"}));
  const std::string what = error_of(
      [&] {
        (void)render_chat(format, {{"user", "Hi"}, {"user", "Ho"}}, true);
      },
      ErrorClass::kInvalidArgument);
  EXPECT_NE(what.find("Roles must alternate"), std::string::npos) << what;
}

TEST(Chat, RepliesOfATemplateAreWhatAnswersAdd) {
  const auto chatml = detect_chat_format(
      "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}");
  const auto chat =
      render_chat(chatml, {{"user", "Yes."}, {"assistant", "Yes."}, {"user", "b"}, {"assistant", "B"}}, false);
  EXPECT_EQ(replies_of(chat), (std::vector<std::string>{"Yes.<|im_end|>\n", "B<|im_end|>\n"}));
  EXPECT_EQ(chat.replies[1].second, chat.text.size());
  // The generation prompt is no part of the text: the answer is looked for behind what comes before it.
  const auto thinking = detect_chat_format(kThinking);
  const auto thought = render_chat(
      thinking, {{"user", "Yes."}, {"assistant", "<think>\nhm\n</think>\n\nYes."}, {"user", "b"}, {"assistant", "B"}},
      false);
  EXPECT_EQ(replies_of(thought), (std::vector<std::string>{"Yes.<|im_end|>\n", "B<|im_end|>\n"}));
  EXPECT_GT(thought.replies[0].first, thought.text.find("assistant"));
  const auto spaced = detect_chat_format(
      "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
      "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}");
  EXPECT_EQ(replies_of(render_chat(spaced, {{"user", "a"}, {"assistant", "b"}}, false)),
            (std::vector<std::string>{" b\n"}));
  EXPECT_EQ(spaced.reply_close, "\n");
}

// Where the text of an answer stands in the template's own words too: DeepSeek-R1 asks for more than it keeps, Phi-3
// ends other turns than the last one.
TEST(Chat, RepliesAreNotTakenForTheTemplatesOwnWords) {
  const auto r1 = detect_chat_format(
      "{% for m in messages %}{{ '<User>' ~ m.content if m.role == 'user' else '<Assistant>' ~ m.content ~ '<end>' }}"
      "{% endfor %}{% if add_generation_prompt %}{{ '<Assistant><think>\n' }}{% endif %}");
  for (const char* answer : {"A", "s", "end", "B"})
    EXPECT_EQ(replies_of(render_chat(r1, {{"user", "U"}, {"assistant", answer}}, false)),
              (std::vector<std::string>{answer + std::string("<end>")}));
  const auto phi3 = detect_chat_format(
      "{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}");
  for (const char* answer : {"a", "e", "b"})
    EXPECT_EQ(
        replies_of(
            render_chat(phi3, {{"user", "u"}, {"assistant", answer}, {"user", "v"}, {"assistant", answer}}, false)),
        (std::vector<std::string>{answer + std::string("<|end|>\n"), answer + std::string("<|end|>\n<|endoftext|>")}));
}

TEST(Chat, NamesTheWayOutOfATemplateThatCannotBeUsed) {
  const auto message = [](const std::string& source) {
    return error_of(
        [&] {
          (void)render_chat(detect_chat_format(source), {{"user", "Hi"}, {"assistant", "Yes"}}, false);
        },
        ErrorClass::kUnsupported);
  };
  for (const char* source : {"a\n{% include 'x' %}", "a\n{{ messages | nofilter }}", "a\n{{ messages.x.y }}"}) {
    EXPECT_NE(message(source).find("chat template:2: "), std::string::npos) << message(source);
    EXPECT_NE(message(source).find("chat_format"), std::string::npos) << message(source);
  }
  EXPECT_NE(message("no answers").find("message 1: an answer that the chat template leaves out"), std::string::npos);
  EXPECT_THROW((void)render_chat(detect_chat_format("a"), {{"tool", "x"}}, true), Error);
}

// As Qwen's files: the model's config has an id all the same.
TEST(Chat, ATokenizerWhoseBosIsNullHasNoneInTemplates) {
  const TemporaryFolder folder("null-bos");
  write_file(folder.path() / "tokenizer.json", byte_level_json().dump());
  write_file(folder.path() / "config.json", R"({"bos_token_id": 66})");
  write_file(folder.path() / "chat_template.jinja", "{{ bos_token }}{{ messages[0].content }}");
  for (const char* text : {"{}", R"({"bos_token": null})"}) {
    write_file(folder.path() / "tokenizer_config.json", text);
    const auto tokenizer = load_tokenizer(folder.path());
    EXPECT_EQ(tokenizer->bos_id(), 66);
    const std::string bos = text == std::string("{}") ? tokenizer->token_text(66) : "";
    EXPECT_EQ(render_chat(chat_format_of(*tokenizer), {{"user", "Hi"}}, true).text, bos + "Hi");
  }
}

TEST(Chat, NamedFormatsHaveTheirTurns) {
  const auto turns = [](const char* name) {
    const std::vector<ChatMessage> messages = {{"system", "Be"}, {"user", "Hi"}, {"assistant", "Yes"}, {"user", "So"}};
    return render_chat(chat_format(name, {"<b>", "<e>"}), messages, true).text;
  };
  EXPECT_EQ(turns("chatml"),
            "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
            "<|im_start|>user\nSo<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(turns("phi4"),
            "<|im_start|>system<|im_sep|>Be<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
            "<|im_start|>assistant<|im_sep|>Yes<|im_end|><|im_start|>user<|im_sep|>So<|im_end|><|im_start|>assistant<|"
            "im_sep|>");
  EXPECT_EQ(turns("phi4-mini"),
            "<|system|>Be<|end|><|user|>Hi<|end|><|assistant|>Yes<|end|><|user|>So<|end|><|assistant|>");
  EXPECT_EQ(
      turns("phi3"),
      "<|system|>\nBe<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nYes<|end|>\n<|user|>\nSo<|end|>\n<|assistant|>\n");
  EXPECT_EQ(turns("zephyr"),
            "<|system|>\nBe<e>\n<|user|>\nHi<e>\n<|assistant|>\nYes<e>\n<|user|>\nSo<e>\n<|assistant|>\n");
  EXPECT_EQ(turns("tulu"), "<|system|>\nBe\n<|user|>\nHi\n<|assistant|>\nYes<e>\n<|user|>\nSo\n<|assistant|>\n");
  EXPECT_EQ(turns("llama2"), "<b>[INST] <<SYS>>\nBe\n<</SYS>>\n\nHi [/INST] Yes <e><b>[INST] So [/INST]");
  EXPECT_EQ(turns("mistral"), "<b> [INST] Be\n\nHi [/INST] Yes<e> [INST] So [/INST]");
  EXPECT_EQ(turns("gemma"),
            "<bos><start_of_turn>user\nBe\n\nHi<end_of_turn>\n<start_of_turn>model\nYes<end_of_turn>\n"
            "<start_of_turn>user\nSo<end_of_turn>\n<start_of_turn>model\n");
}

TEST(Chat, SpecialTokensAreFoundWhereTheTokenizerDoesNotLookForThem) {
  EMEND_NEEDS_SHARED();
  const auto tokenizer = load_tokenizer(emend::testing::shared_dir() / "fixtures" / "tokenizers" / "chatglm3");
  const std::string text = "[gMASK]sop<|user|>\n Hello<|assistant|>";
  const Encoding encoding = encode_chat(*tokenizer, text);
  Ids expected = {64790, 64792, 64795};
  const Ids words = tokenizer->encode_ids("\n Hello");
  expected.insert(expected.end(), words.begin(), words.end());
  expected.push_back(64796);
  EXPECT_EQ(encoding.ids, expected);
  EXPECT_EQ(tokenizer->token_text(words[words.size() - 2]), "<0x0A>");
  EXPECT_EQ(tokenizer->token_text(words.back()), "▁Hello");
  EXPECT_EQ(encoding.offsets[2], (std::pair<size_t, size_t>(10, 18)));
  EXPECT_EQ(encoding.offsets.back(), (std::pair<size_t, size_t>(25, 38)));
  EXPECT_EQ(text.substr(encoding.offsets[encoding.size() - 2].first), " Hello<|assistant|>");
  // Others are encoded as ever.
  json document = byte_level_json({{"a", "b"}});
  document["added_tokens"] = json::array({added_token("<a>", 257)});
  EXPECT_EQ(encode_chat(*make_tokenizer(document), "ab<a>").ids, (Ids{256, 257}));
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
