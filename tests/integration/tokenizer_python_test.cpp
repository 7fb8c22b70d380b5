// Hugging Face tokenizers and transformers agree on random texts: with the tokenizer.json of the fixtures, and with
// the folders that we write for tokenizers from GGUF files.
#include <emend/models/checkpoint.h>
#include <emend/models/tokenizer/gguf_vocabulary.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>

#include "support/default_model.h"
#include "support/python.h"
#include "support/random_text.h"
#include "support/shared.h"
#include "support/tiny_tokenizer.h"

namespace emend::models {
namespace tokenizer_python_test {

using emend::testing::random_text;
using emend::testing::shared_dir;
using emend::testing::TemporaryFolder;
using nlohmann::json;
namespace fs = std::filesystem;

// Compares the ids of each text, without and with special tokens, and the decoded text; prints what differs.
constexpr const char* kScript = R"(
import json, sys
import tokenizers, transformers
for job in json.load(open(sys.argv[1])):
    bad = 0
    tok = tokenizers.Tokenizer.from_file(job["folder"] + "/tokenizer.json")
    auto = transformers.AutoTokenizer.from_pretrained(job["folder"]) if job["auto"] else None
    for case in job["cases"]:
        text = case["text"]
        got = tok.encode(text, add_special_tokens=False).ids, tok.encode(text).ids
        if auto is not None and got != (auto(text, add_special_tokens=False)["input_ids"], auto(text)["input_ids"]):
            got = "AutoTokenizer differs"
        if got != (case["ids"], case["special"]) or tok.decode(case["ids"], skip_special_tokens=False) != case["decoded"]:
            bad += 1
            if bad < 4: print(ascii(text), got, case)
    for name, want in (job["named"].items() if auto is not None else ()):
        if getattr(auto, name) != want:
            bad += 1
            print(name, getattr(auto, name), want)
    print(job["name"], "checked", len(job["cases"]), "bad", bad)
)";

json job(const std::string& name, const Tokenizer& tokenizer, const fs::path& folder, bool with_auto, size_t count) {
  std::mt19937_64 random(99);
  std::vector<std::string> own;  // pieces of the vocabulary itself
  const auto size = static_cast<uint64_t>(tokenizer.vocab_size());
  for (int i = 0; i < 200; ++i) own.push_back(tokenizer.token_text(static_cast<int64_t>(random() % size)));
  json cases = json::array();
  for (size_t i = 0; i < count; ++i) {
    const std::string text = random_text(random, 12, own);
    const auto ids = tokenizer.encode_ids(text);
    cases.push_back({{"text", text},
                     {"ids", ids},
                     {"special", tokenizer.encode_ids(text, true)},
                     {"decoded", tokenizer.decode(ids)}});
  }
  json named = json::object();
  if (tokenizer.bos_id()) named["bos_token_id"] = *tokenizer.bos_id();
  if (tokenizer.eos_id()) named["eos_token_id"] = *tokenizer.eos_id();
  return {{"name", name}, {"folder", folder.string()}, {"auto", with_auto}, {"cases", cases}, {"named", named}};
}

void expect_agreement(const json& jobs) {
  const TemporaryFolder work("emend-tokenizer-python");
  work.write("jobs.json", jobs.dump());
  work.write("check.py", kScript);
  const std::string command = emend::testing::test_python().string() + " " + (work.path() / "check.py").string() + " " +
                              (work.path() / "jobs.json").string();
  const auto [status, output] = emend::testing::run_shell(command);
  EXPECT_EQ(status, 0) << output;
  for (const json& entry : jobs) {
    const std::string line =
        entry["name"].get<std::string>() + " checked " + std::to_string(entry["cases"].size()) + " bad 0\n";
    EXPECT_NE(output.find(line), std::string::npos) << line << output;
  }
}

TEST(TokenizerPython, Fixtures) {
  EMEND_NEEDS_PYTHON();
  EMEND_NEEDS_SHARED();
  json jobs = json::array();
  for (const char* name : {"gpt2", "llama3", "llama2", "phi3", "qwen2", "gpt_neox", "falcon", "smollm2"}) {
    const fs::path folder = shared_dir() / "fixtures" / "tokenizers" / name;
    jobs.push_back(job(name, *load_tokenizer(folder), folder, false, 1000));
  }
  expect_agreement(jobs);
}

TEST(TokenizerPython, SavedByteLevelVocabulary) {
  EMEND_NEEDS_PYTHON();
  json jobs = json::array();
  const TemporaryFolder top("emend-tokenizer-saved");
  for (const char* pre :
       {"gpt-2", "smollm", "llama-bpe", "qwen2", "falcon", "command-r", "tekken", "gpt-4o", "deepseek-v3"}) {
    SCOPED_TRACE(pre);
    GgufVocabulary vocabulary;
    vocabulary.source = "test.gguf";
    vocabulary.model = "gpt2";
    vocabulary.pre = pre;
    vocabulary.tokens.assign(detail::byte_level_characters().begin(), detail::byte_level_characters().end());
    for (const char* merge : {"t h", "th e", "Ġ Ġ", "Ġ the", "Ã ©", "1 2", "' l", "'l l", "Ġ W"}) {
      vocabulary.merges.emplace_back(merge);
      std::string piece = merge;
      piece.erase(piece.find(' '), 1);
      vocabulary.tokens.push_back(piece);
    }
    vocabulary.token_types.assign(vocabulary.tokens.size(), 1);
    vocabulary.bos = vocabulary.tokens.size();
    vocabulary.eos = vocabulary.tokens.size() + 1;
    for (const char* special : {"<s>", "</s>"}) {
      vocabulary.tokens.emplace_back(special);
      vocabulary.token_types.push_back(3);
    }
    vocabulary.chat_template = "{{ messages }}";
    const auto tokenizer = tokenizer_from_gguf(vocabulary);
    const fs::path folder = top.path() / pre;
    save_tokenizer(*tokenizer, folder);
    jobs.push_back(job(pre, *tokenizer, folder, true, 300));
    EXPECT_EQ(load_tokenizer(folder)->fingerprint(), tokenizer->fingerprint());
    EXPECT_EQ(load_tokenizer(folder)->chat_template(), "{{ messages }}");
  }
  expect_agreement(jobs);
}

TEST(TokenizerPython, SavedSentencePieceVocabulary) {
  EMEND_NEEDS_PYTHON();
  GgufVocabulary vocabulary;
  vocabulary.source = "test.gguf";
  vocabulary.model = "llama";
  const auto add = [&](const std::string& piece, float score, int32_t type) {
    vocabulary.tokens.push_back(piece);
    vocabulary.scores.push_back(score);
    vocabulary.token_types.push_back(type);
  };
  add("<unk>", 0, 2);
  add("<s>", 0, 3);
  add("</s>", 0, 3);
  for (int byte = 0; byte < 256; ++byte) add(formatted("<0x%02X>", byte), 0, 6);
  float score = 0;
  for (const char* piece :
       {"▁t", "he", "▁the", "ll", "▁▁", "ab", "Hello", "lo", "el", "Hel", "▁", "t", "h", "e", "l", "a", "b", "H", "o"})
    add(piece, --score, 1);
  vocabulary.bos = 1;
  vocabulary.eos = 2;
  vocabulary.unk = 0;
  const auto tokenizer = tokenizer_from_gguf(vocabulary);
  const TemporaryFolder folder("emend-tokenizer-saved");
  save_tokenizer(*tokenizer, folder.path());
  expect_agreement(json::array({job("saved", *tokenizer, folder.path(), true, 1000)}));
}

TEST(TokenizerPython, SavedDefaultModel) {
  EMEND_NEEDS_PYTHON();
  EMEND_NEEDS_DEFAULT_MODEL();
  const auto tokenizer = open_checkpoint(emend::testing::default_model_path().string())->load_tokenizer();
  const TemporaryFolder folder("emend-tokenizer-saved");
  save_tokenizer(*tokenizer, folder.path());
  expect_agreement(json::array({job("saved", *tokenizer, folder.path(), true, 1000)}));
}

}  // namespace tokenizer_python_test
}  // namespace emend::models
