// SmolLM2-135M-Instruct as the package of the default model ships it, against the gguf Python package.
#include <emend/core/sha256.h>
#include <emend/evaluation/free_text.h>
#include <emend/models/checkpoint.h>
#include <emend/models/gguf/gguf_checkpoint.h>
#include <emend/models/gguf/gguf_writer.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include <cctype>
#include <chrono>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "support/default_model.h"
#include "support/gguf_builder.h"

namespace emend::models {
namespace gguf_default_model_test {

nlohmann::json recorded() {
  std::ifstream in(EMEND_SOURCE_DIR "/tests/fixtures/gguf_py.json");
  return nlohmann::json::parse(in)["default_model"];
}

TEST(GgufDefaultModel, EveryTensorHasTheRecordedValues) {
  EMEND_NEEDS_DEFAULT_MODEL();
  const auto start = std::chrono::steady_clock::now();
  const auto checkpoint = open_gguf_checkpoint(emend::testing::default_model_path());
  const auto expected = recorded();
  EXPECT_EQ(checkpoint->tensors().size(), expected.size());
  int64_t values = 0;
  double reading = 0;
  for (const auto& info : checkpoint->tensors()) {
    ASSERT_TRUE(expected.contains(info.name)) << info.name;
    const auto begin = std::chrono::steady_clock::now();
    const at::Tensor tensor = checkpoint->read(info.name);
    reading += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    values += tensor.numel();
    const at::Tensor plain = tensor.add(0.0);  // -0 is written as 0
    const std::string_view bytes(static_cast<const char*>(plain.const_data_ptr()), plain.nbytes());
    EXPECT_EQ(sha256_hex(bytes).substr(0, 16), expected[info.name]) << info.name;
  }
  EXPECT_EQ(values, 134515008);
  std::cout << "[ figure   ] " << values << " values in " << reading << " s, "
            << std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() << " s with hashing\n";
}

TEST(GgufDefaultModel, ConfigurationIsThatOfTheHuggingFaceModel) {
  EMEND_NEEDS_DEFAULT_MODEL();
  const auto config = open_gguf_checkpoint(emend::testing::default_model_path())->config();
  const nlohmann::json expected = {{"architectures", {"LlamaForCausalLM"}},
                                   {"model_type", "llama"},
                                   {"hidden_size", 576},
                                   {"intermediate_size", 1536},
                                   {"num_hidden_layers", 30},
                                   {"num_attention_heads", 9},
                                   {"num_key_value_heads", 3},
                                   {"vocab_size", 49152},
                                   {"max_position_embeddings", 8192},
                                   {"rms_norm_eps", 1e-5},
                                   {"rope_theta", 100000.0},
                                   {"tie_word_embeddings", true},
                                   {"attention_bias", false},
                                   {"mlp_bias", false},
                                   {"hidden_act", "silu"},
                                   {"bos_token_id", 1},
                                   {"eos_token_id", 2}};
  for (const auto& [key, value] : expected.items()) EXPECT_EQ(config.value(key, nlohmann::json()), value) << key;
  EXPECT_FALSE(config.contains("rope_scaling"));
}

TEST(GgufDefaultModel, TokenizerSpeaksAndKnowsItsTemplate) {
  EMEND_NEEDS_DEFAULT_MODEL();
  const auto tokenizer = open_gguf_checkpoint(emend::testing::default_model_path())->load_tokenizer();
  ASSERT_NE(tokenizer, nullptr);
  // As llama.cpp tokenises it.
  const std::vector<int64_t> expected{504, 414, 46682, 18669, 314, 3807, 281, 260, 2240, 282};
  EXPECT_EQ(tokenizer->encode_ids("The Eiffel Tower is located in the city of"), expected);
  EXPECT_NE(tokenizer->chat_template().find("<|im_start|>"), std::string::npos);
  EXPECT_EQ(tokenizer->vocab_size(), 49152);
}

// A dot behind a digit ends a sentence if the next token says so, which is not kept then.
TEST(GgufDefaultModel, TextsAreNotCutInsideOfANumber) {
  EMEND_NEEDS_DEFAULT_MODEL();
  const Model model = load_model(emend::testing::default_model_path().string());
  const auto texts = evaluation::write_on(
      model, {"The value of pi is approximately", "Question: What is 2 + 2?\nAnswer: 2 + 2 is equal to", "1 + 1 ="});
  EXPECT_TRUE(texts[0].text.starts_with(" 3.14")) << texts[0].text;
  EXPECT_FALSE(evaluation::begins_with(texts[0].text, "3"));
  for (const auto& [text, ids] : texts)
    for (size_t at = 1; at + 1 < text.size(); ++at)
      EXPECT_FALSE(text[at] == '.' && std::isdigit(static_cast<unsigned char>(text[at - 1])) && text[at + 1] == ' ')
          << text;
}

TEST(GgufDefaultModel, ACopyIsTheSameFile) {
  EMEND_NEEDS_DEFAULT_MODEL();
  const testing::TemporaryFolder folder("gguf_default");
  const auto path = emend::testing::default_model_path();
  (void)write_gguf(*open_gguf_checkpoint(path), folder / "copy.gguf");
  const MappedFile original(path), copy(folder / "copy.gguf");
  ASSERT_EQ(copy.size(), original.size());
  EXPECT_EQ(std::memcmp(copy.data(), original.data(), original.size()), 0);
}

}  // namespace gguf_default_model_test
}  // namespace emend::models
