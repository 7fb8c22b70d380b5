// Vocabularies as GGUF files hold them give the same ids as the folders they were made from.
#include <emend/models/checkpoint.h>
#include <emend/models/tokenizer/gguf_vocabulary.h>
#include <gtest/gtest.h>
#include <sentencepiece_processor.h>

#include "support/default_model.h"
#include "support/shared.h"
#include "support/tiny_tokenizer.h"
#include "support/tokenizer_cases.h"

namespace emend::models {
namespace tokenizer_gguf_test {

using emend::testing::expect_cases;
using emend::testing::read_json;
using emend::testing::shared_dir;
using emend::testing::TemporaryFolder;
using nlohmann::json;
namespace fs = std::filesystem;

fs::path fixtures() {
  return shared_dir() / "fixtures" / "tokenizers";
}

// What a converter writes for a byte-level tokenizer.json.
GgufVocabulary byte_level_vocabulary(const std::string& name, const std::string& pre) {
  const json document = read_json(fixtures() / name / "tokenizer.json");
  GgufVocabulary vocabulary;
  vocabulary.source = name + ".gguf";
  vocabulary.model = "gpt2";
  vocabulary.pre = pre;
  const auto set = [&](const std::string& piece, size_t id, int32_t type) {
    if (id >= vocabulary.tokens.size()) {
      vocabulary.tokens.resize(id + 1);
      vocabulary.token_types.resize(id + 1, 5);
    }
    vocabulary.tokens[id] = piece;
    vocabulary.token_types[id] = type;
  };
  for (const auto& [piece, id] : document["model"]["vocab"].items()) set(piece, id.get<size_t>(), 1);
  for (const auto& token : document["added_tokens"])
    set(token["content"].get<std::string>(), token["id"].get<size_t>(), token["special"].get<bool>() ? 3 : 4);
  vocabulary.merges = document["model"]["merges"].get<std::vector<std::string>>();
  return vocabulary;
}

GgufVocabulary sentencepiece_vocabulary(const std::string& name) {
  sentencepiece::SentencePieceProcessor processor;
  EXPECT_TRUE(processor.Load((fixtures() / name / "tokenizer.model").string()).ok());
  GgufVocabulary vocabulary;
  vocabulary.source = name + ".gguf";
  vocabulary.model = "llama";
  for (int id = 0; id < processor.GetPieceSize(); ++id) {
    vocabulary.tokens.push_back(processor.IdToPiece(id));
    vocabulary.scores.push_back(processor.GetScore(id));
    vocabulary.token_types.push_back(processor.IsUnknown(id)   ? 2
                                     : processor.IsControl(id) ? 3
                                     : processor.IsByte(id)    ? 6
                                                               : 1);
  }
  vocabulary.bos = processor.bos_id();
  vocabulary.eos = processor.eos_id();
  vocabulary.unk = processor.unk_id();
  return vocabulary;
}

struct Source {
  const char* name;
  const char* pre;
};

class GgufTokenizer : public ::testing::TestWithParam<Source> {};

// Both the tokenizer itself and the Hugging Face folder written from it.
TEST_P(GgufTokenizer, GivesTheRecordedIds) {
  EMEND_NEEDS_SHARED();
  const auto [name, pre] = GetParam();
  GgufVocabulary vocabulary = *pre ? byte_level_vocabulary(name, pre) : sentencepiece_vocabulary(name);
  if (std::string(name) == "llama3") vocabulary.bos = 128000;
  vocabulary.eot = 5;
  const auto tokenizer = tokenizer_from_gguf(vocabulary);
  expect_cases(*tokenizer, fixtures() / name / "cases.json");
  const TemporaryFolder folder("emend-gguf-tokenizer");
  save_tokenizer(*tokenizer, folder.path());
  const auto saved = load_tokenizer(folder.path());
  expect_cases(*saved, fixtures() / name / "cases.json");
  EXPECT_EQ(std::ranges::count(saved->eos_ids(), 5), 1) << "what ends a turn";
  EXPECT_EQ(saved->eos_ids().size(), tokenizer->eos_ids().size());
}

INSTANTIATE_TEST_SUITE_P(All, GgufTokenizer,
                         ::testing::Values(Source{"gpt2", "gpt-2"}, Source{"llama3", "llama-bpe"},
                                           Source{"qwen2", "qwen2"}, Source{"smollm2", "smollm"},
                                           Source{"falcon", "falcon"}, Source{"llama2", ""}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(GgufTokenizers, Phi3TokensTakeTheSpaceBehindThem) {
  EMEND_NEEDS_SHARED();
  GgufVocabulary vocabulary = sentencepiece_vocabulary("llama2");
  vocabulary.name = "Phi 3 Mini (phi-3)";
  vocabulary.token_types[2] = 1;  // </s> is an ordinary piece there
  const json document = read_json(fixtures() / "phi3" / "tokenizer.json");
  for (const auto& token : document["added_tokens"]) {
    const auto id = token["id"].get<size_t>();
    if (id < vocabulary.tokens.size()) continue;
    vocabulary.tokens.push_back(token["content"].get<std::string>());
    vocabulary.scores.push_back(-1000);
    vocabulary.token_types.push_back(3);
    ASSERT_EQ(vocabulary.tokens.size(), id + 1);
  }
  expect_cases(*tokenizer_from_gguf(vocabulary), fixtures() / "phi3" / "cases.json");
}

TEST(GgufTokenizers, DefaultModel) {
  EMEND_NEEDS_SHARED();
  EMEND_NEEDS_DEFAULT_MODEL();
  const auto tokenizer = open_checkpoint(emend::testing::default_model_path().string())->load_tokenizer();
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(expect_cases(*tokenizer, fixtures() / "smollm2" / "cases.json"), 277u);
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  EXPECT_FALSE(tokenizer->chat_template().empty());
  EXPECT_EQ(tokenizer->vocab_size(), 49152);
}

}  // namespace tokenizer_gguf_test
}  // namespace emend::models
