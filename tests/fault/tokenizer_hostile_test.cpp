// Damaged and hostile tokenizer files: each ends in an error that names file and key, soon, and never in a crash.
#include <emend/core/error.h>
#include <emend/models/tokenizer/gguf_vocabulary.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <random>

#include "support/error_of.h"
#include "support/tiny_tokenizer.h"

namespace emend::models {
namespace tokenizer_hostile_test {

using emend::testing::added_token;
using emend::testing::byte_level_json;
using emend::testing::TemporaryFolder;
using nlohmann::json;

/// The message with which a tokenizer.json of `text` is refused; fails if it is accepted or takes long.
std::string refusal(const std::string& text) {
  const auto start = std::chrono::steady_clock::now();
  std::string message;
  try {
    (void)detail::make_pipeline(detail::parse_tokenizer_json(text, "tokenizer.json"));
    ADD_FAILURE() << "accepted: " << text.substr(0, 200);
  } catch (const Error& error) {
    message = error.what();
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  EXPECT_LT(taken.count(), 2.0) << message;
  EXPECT_EQ(message.rfind("tokenizer.json", 0), 0u) << message;
  EXPECT_LT(message.size(), 1200u) << "a message must not echo the file";
  return message;
}

std::string refusal(const std::function<void(json&)>& change) {
  json document = byte_level_json({{"a", "b"}});
  change(document);
  return refusal(document.dump());
}

void expect_part(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << "\"" << part << "\" is not in: " << message;
}

TEST(TokenizerHostile, BrokenJson) {
  expect_part(refusal(""), "tokenizer.json:1:1");
  expect_part(refusal("{\n \"model\": nope}"), "tokenizer.json:2:");
  expect_part(refusal("[]"), "an object");
  expect_part(refusal("{}"), "\"model\" is missing");
  expect_part(refusal("{\"model\": {\"type\": \"BPE\", \"vocab\": {\"\xFF\": 1}}}"), "tokenizer.json:1:");
  const std::string whole = byte_level_json({{"a", "b"}}).dump();
  for (size_t cut = 0; cut < whole.size(); cut += 97) expect_part(refusal(whole.substr(0, cut)), "tokenizer.json:1:");
  expect_part(refusal("{\"normalizer\": " + std::string(100'000, '[')), "nesting");
  expect_part(refusal("{\"model\": {\"vocab\": " + std::string(100'000, '{')), "tokenizer.json");
}

TEST(TokenizerHostile, BadModel) {
  expect_part(refusal([](json& j) { j["model"].erase("vocab"); }), "\"model.vocab\" is missing");
  expect_part(refusal([](json& j) { j["model"].erase("merges"); }), "\"model.merges\" is missing");
  expect_part(refusal([](json& j) { j["model"]["vocab"] = 3; }), "model.vocab");
  expect_part(refusal([](json& j) { j["model"]["merges"] = "x"; }), "model.merges");
  expect_part(refusal([](json& j) { j["model"]["type"] = "WordPiece"; }), "WordPiece");
  expect_part(refusal([](json& j) { j["model"]["type"] = 7; }), "model.type");
  for (const json& id : {json(-1), json(1.5), json("7"), json(1LL << 40), json(nullptr), json::object(), json::array()})
    expect_part(refusal([&](json& j) { j["model"]["vocab"]["ab"] = id; }), "model.vocab.ab");
  for (const json& merge :
       {json("ab"), json("a b c"), json(3), json::array({"a"}), json::array({"a", "b", "c"}), json::object()})
    expect_part(refusal([&](json& j) { j["model"]["merges"].push_back(merge); }), "model.merges[1]");
  expect_part(refusal([](json& j) { j["model"]["merges"].push_back("a z9"); }), "not in the vocabulary");
  expect_part(refusal([](json& j) { j["model"]["dropout"] = 0.1; }), "dropout");
  expect_part(refusal([](json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }), "end_of_word_suffix");
  expect_part(refusal([](json& j) { j["model"]["vocab"][std::string(100'000, 'x')] = -1; }), "model.vocab");
}

TEST(TokenizerHostile, BadParts) {
  expect_part(refusal([](json& j) { j["normalizer"] = 3; }), "\"normalizer\"");
  expect_part(refusal([](json& j) { j["normalizer"] = {{"type", "Precompiled"}}; }), "Precompiled");
  expect_part(refusal([](json& j) { j["normalizer"] = {{"type", "Prepend"}}; }), "normalizer.prepend");
  expect_part(refusal([](json& j) {
                j["pre_tokenizer"] = {{"type", "Split"}, {"behavior", "Isolated"}};
              }),
              "pre_tokenizer.pattern");
  expect_part(refusal([](json& j) { j["pre_tokenizer"]["add_prefix_space"] = "yes"; }),
              "pre_tokenizer.add_prefix_space");
  expect_part(refusal([](json& j) {
                j["pre_tokenizer"] = {{"type", "Split"}, {"pattern", {{"Regex", "(a"}}}, {"behavior", "Isolated"}};
              }),
              "pre_tokenizer.pattern.Regex");
  expect_part(refusal([](json& j) {
                j["pre_tokenizer"] = {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Sideways"}};
              }),
              "pre_tokenizer.behavior");
  expect_part(refusal([](json& j) {
                j["decoder"] = {{"type", "Strip"}, {"content", " "}, {"start", -1}, {"stop", 0}};
              }),
              "decoder.start");
  expect_part(refusal([](json& j) {
                j["post_processor"] = {{"type", "TemplateProcessing"}, {"single", json::array()}};
              }),
              "post_processor.special_tokens");
  expect_part(refusal([](json& j) {
                j["added_tokens"] = {added_token("<a>", 5)};
                j["added_tokens"][0]["id"] = -2;
              }),
              "added_tokens[0].id");
  expect_part(refusal([](json& j) { j["added_tokens"] = {{{"id", 5}}}; }), "added_tokens[0].content");
  json deep = {{"type", "NFC"}};
  for (int i = 0; i < 40; ++i) deep = {{"type", "Sequence"}, {"normalizers", json::array({deep})}};
  expect_part(refusal([&](json& j) { j["normalizer"] = deep; }), "nested");
}

TEST(TokenizerHostile, HostilePatternsStopOnText) {
  json document = byte_level_json();
  const json pattern = {{"type", "Split"}, {"pattern", {{"Regex", "(x+x+)+[yz]"}}}, {"behavior", "Isolated"}};
  document["pre_tokenizer"] = {{"type", "Sequence"},
                               {"pretokenizers", json::array({pattern, document["pre_tokenizer"]})}};
  const auto tokenizer = emend::testing::make_tokenizer(document);
  EXPECT_EQ(tokenizer->encode_ids("xxy").size(), 3u);
  const auto start = std::chrono::steady_clock::now();
  expect_part(emend::testing::error_of([&] { (void)tokenizer->encode_ids(std::string(3000, 'x')); },
                                       ErrorClass::kInvalidArgument),
              "pre_tokenizer");
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 5.0);
}

TEST(TokenizerHostile, RandomDamage) {
  json document = byte_level_json({{"a", "b"}, {"ab", "c"}});
  document["added_tokens"] = {added_token("<a>", 258, {{"lstrip", true}})};
  document["normalizer"] = {{"type", "NFC"}};
  const std::string whole = document.dump();
  std::mt19937_64 random(11);
  size_t refused = 0, accepted = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string text = whole;
    for (size_t n = 1 + random() % 4; n > 0; --n) {
      const size_t at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, random() % 40);
          break;
        default:
          text.insert(at, text.substr(random() % text.size(), random() % 40));
      }
    }
    try {
      const auto tokenizer = detail::make_pipeline(detail::parse_tokenizer_json(text, "tokenizer.json"));
      (void)tokenizer->decode(tokenizer->encode_ids("abc <a> é 12", true));
      ++accepted;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000u);
  EXPECT_GT(accepted, 10u);
}

TEST(TokenizerHostile, Folders) {
  const auto refused = [](const std::filesystem::path& folder) {
    try {
      (void)load_tokenizer(folder);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const TemporaryFolder folder("emend-hostile");
  expect_part(refused(folder.path() / "nothing"), "no such folder");
  expect_part(refused(folder.path()), "no tokenizer");
  folder.write("tokenizer.model", "this is not a model");
  expect_part(refused(folder.path()), "tokenizer.model");
  folder.write("tokenizer.model", "");
  expect_part(refused(folder.path()), "tokenizer.model");
  folder.write("tokenizer.model", "IQ== 0\nIg== 1\nbroken\n");
  expect_part(refused(folder.path()), "tokenizer.model:3");
  std::filesystem::remove(folder.path() / "tokenizer.model");
  folder.write("vocab.json", "{\"a\": 0, \"b\": 1}");
  folder.write("merges.txt", "#version: 0.2\na b\n");
  expect_part(refused(folder.path()), "merges.txt:2");
  folder.write("tokenizer.json", byte_level_json().dump());
  EXPECT_EQ(refused(folder.path()), "accepted");
  for (const auto& [name, text, part] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"tokenizer_config.json", "{\"bos_token\": 3}", "bos_token"},
           {"tokenizer_config.json", "{\"added_tokens_decoder\": {\"x\": {\"content\": \"a\"}}}",
            "added_tokens_decoder"},
           {"tokenizer_config.json", "{\"added_tokens_decoder\": {\"3\": {\"content\": \"new\"}}}", "id 3"},
           {"tokenizer_config.json", "{\"chat_template\": [{}]}", "chat_template[0].template"},
           {"tokenizer_config.json", "[", "tokenizer_config.json:1"},
           {"generation_config.json", "{\"eos_token_id\": \"2\"}", "eos_token_id"},
           {"added_tokens.json", "{\"x\": \"y\"}", "added_tokens.json"},
       }) {
    folder.write(name, text);
    expect_part(refused(folder.path()), part);
    std::filesystem::remove(folder.path() / name);
  }
}

TEST(TokenizerHostile, GgufVocabularies) {
  const auto refused = [](const std::function<void(GgufVocabulary&)>& change) {
    GgufVocabulary vocabulary;
    vocabulary.source = "model.gguf";
    vocabulary.model = "gpt2";
    vocabulary.tokens = {"a", "b", "ab"};
    vocabulary.token_types = {1, 1, 1};
    vocabulary.merges = {"a b"};
    change(vocabulary);
    try {
      (void)tokenizer_from_gguf(vocabulary);
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).rfind("model.gguf: key \"tokenizer.ggml.", 0), 0u) << error.what();
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refused([](GgufVocabulary&) {}), "accepted");
  expect_part(refused([](GgufVocabulary& v) { v.tokens.clear(); }), "tokens");
  expect_part(refused([](GgufVocabulary& v) { v.token_types.pop_back(); }), "token_type");
  expect_part(refused([](GgufVocabulary& v) { v.scores = {1}; }), "scores");
  expect_part(refused([](GgufVocabulary& v) { v.merges.clear(); }), "merges");
  expect_part(refused([](GgufVocabulary& v) { v.merges = {"a"}; }), "merges[0]");
  expect_part(refused([](GgufVocabulary& v) { v.merges = {""}; }), "merges[0]");
  expect_part(refused([](GgufVocabulary& v) { v.merges = {"a c"}; }), "merges[0]");
  expect_part(refused([](GgufVocabulary& v) { v.tokens[0] = "\xFF"; }), "tokens[0]");
  expect_part(refused([](GgufVocabulary& v) { v.eos = 3; }), "eos_token_id");
  expect_part(refused([](GgufVocabulary& v) { v.bos = -1; }), "bos_token_id");
  expect_part(refused([](GgufVocabulary& v) { v.pre = "smolm"; }), "did you mean \"smollm\"");
  expect_part(refused([](GgufVocabulary& v) { v.model = "bert"; }), "\"gpt2\" or \"llama\"");
  expect_part(refused([](GgufVocabulary& v) { v.model = "llama"; }), "scores");
  expect_part(refused([](GgufVocabulary& v) {
                v.model = "llama";
                v.scores = {0, 0, NAN};
              }),
              "scores[2]");
}

}  // namespace tokenizer_hostile_test
}  // namespace emend::models
