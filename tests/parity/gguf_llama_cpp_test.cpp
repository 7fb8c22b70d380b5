// Against llama.cpp's own converter: our files of the parity fixtures have its tensors byte for byte, and files with
// its metadata give the recorded logits. The record is tests/fixtures/gguf_conversions.json (see gguf_conversions.py).
#include <ATen/core/grad_mode.h>
#include <emend/core/safetensors.h>
#include <emend/core/sha256.h>
#include <emend/models/gguf/gguf_checkpoint.h>
#include <emend/models/gguf/gguf_writer.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iostream>
#include <set>

#include "support/debug_models.h"
#include "support/gguf_builder.h"
#include "support/shared.h"

namespace emend::models {
namespace gguf_llama_cpp_test {

using testing::TemporaryFolder;

constexpr double kTolerance = 1e-4;  // as for the fixtures themselves

const nlohmann::json& record() {
  static const nlohmann::json record = [] {
    std::ifstream in(EMEND_SOURCE_DIR "/tests/fixtures/gguf_conversions.json");
    return nlohmann::json::parse(in);
  }();
  return record;
}

std::vector<std::string> names() {
  std::vector<std::string> list;
  for (const auto& [name, entry] : record()["fixtures"].items()) list.push_back(name);
  return list;
}

/// Fixtures whose configuration GGUF's keys, as llama.cpp writes them, do not hold.
const std::map<std::string, std::string> kLost = {
    {"baichuan_13b", "ALiBi is told by 40 layers"},
    {"gemma2", "the scale of attention"},
    {"gemma3_text", "the scale of attention and the pattern of windows"},
    {"glm", "the converter writes another epsilon"},
    {"glm4_chat", "the converter takes hidden / heads for the head size"},
    {"gpt2_prefixed", "scale by inverse layer, exact GELU"},
    {"gpt_neox_sequential", "the rotary base, the activation"},
    {"mistral", "the window"},
    {"qwen_v1", "the epsilon's key is another, log-n scaling"},
    {"qwen_v1_ntk", "dynamic NTK scaling"},
};

class GgufLlamaCpp : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    EMEND_NEEDS_SHARED();
    fixture_ = emend::testing::shared_dir() / "fixtures" / GetParam();
    if (!std::filesystem::exists(fixture_)) GTEST_SKIP() << "no fixture " << fixture_;
    report_ = write_gguf(*open_checkpoint(fixture_.string()), path_, {.type = GgmlType::kF32, .keep_config = false});
  }
  const nlohmann::json& entry() const { return record()["fixtures"][GetParam()]; }
  // Largest difference between the logits of a file and the recorded ones.
  double difference(const std::filesystem::path& file) const {
    const Model model = load_model(open_gguf_checkpoint(file));
    const SafetensorsFile expected(fixture_ / "expected.safetensors");
    const auto batch =
        TokenBatch::from_padded(expected.tensor("right.input_ids"), expected.tensor("right.attention_mask"));
    const at::NoGradGuard no_grad;
    const at::Tensor logits = batch.unpack(model.forward(batch).logits);
    const at::Tensor mask = expected.tensor("right.attention_mask").to(at::kBool);
    return (logits.index({mask}) - expected.tensor("right.logits").index({mask})).abs().max().item<double>();
  }

  TemporaryFolder folder_{"gguf_llama_cpp_" + GetParam()};
  std::filesystem::path path_ = folder_ / "ours.gguf", fixture_;
  GgufWriteReport report_;
};

TEST_P(GgufLlamaCpp, TensorsHaveTheBytesOfItsConverter) {
  const GgufFile file(path_);
  EXPECT_EQ(file.text("general.architecture"), entry()["architecture"]);
  EXPECT_EQ(file.tensors().size(), entry()["tensors"].size());
  for (const auto& [name, expected] : entry()["tensors"].items()) {
    const GgufTensor* tensor = file.find_tensor(name);
    ASSERT_NE(tensor, nullptr) << name;
    EXPECT_EQ(to_string(tensor->type), expected[0]) << name;
    EXPECT_EQ(nlohmann::json(tensor->shape), expected[1]) << name;
    const std::string_view bytes(reinterpret_cast<const char*>(file.data(*tensor)), tensor->bytes);
    if (!entry()["tables"].contains(name)) {
      EXPECT_EQ(sha256_hex(bytes).substr(0, 16), expected[2]) << name;
      continue;
    }
    const auto* values = reinterpret_cast<const float*>(bytes.data());  // computed: the last bit may differ
    for (size_t i = 0; i < entry()["tables"][name].size(); ++i)
      EXPECT_FLOAT_EQ(values[i], entry()["tables"][name][i].get<float>()) << name;
  }
}

TEST_P(GgufLlamaCpp, ItsKeysHaveItsValues) {
  const GgufFile file(path_);
  // Where we write the truth and the converter a constant or another key.
  const std::set<std::string> ours = {"gpt2_prefixed gpt2.feed_forward_length",
                                      "phi phi2.feed_forward_length",
                                      "falcon falcon.context_length",
                                      "falcon_new_decoder falcon.context_length",
                                      "glm chatglm.context_length",
                                      "glm chatglm.attention.layer_norm_rms_epsilon",
                                      "glm4_chat chatglm.rope.dimension_count",
                                      "qwen_v1 qwen.attention.layer_norm_epsilon",
                                      "qwen_v1_ntk qwen.attention.layer_norm_epsilon",
                                      "baichuan_13b baichuan.rope.dimension_count",
                                      "phi3 phi3.rope.scaling.original_context_length"};
  for (const auto& [key, expected] : entry()["metadata"].items()) {
    if (ours.count(GetParam() + " " + key) || key.ends_with(".vocab_size")) continue;
    ASSERT_NE(file.find(key), nullptr) << key;
    if (expected.is_number()) {
      EXPECT_NEAR(*file.number(key), expected.get<double>(), 1e-6 * std::abs(expected.get<double>())) << key;
    } else if (expected.is_boolean()) {
      EXPECT_EQ(file.flag(key), expected.get<bool>()) << key;
    } else {
      EXPECT_EQ(file.text(key), expected.get<std::string>()) << key;
    }
  }
}

// Our bytes are its bytes, so a file with its metadata is its file but for the order of tensors.
TEST_P(GgufLlamaCpp, ItsFilesGiveTheRecordedLogits) {
  GgufMetadata metadata;
  metadata.set_text("general.architecture", entry()["architecture"].get<std::string>());
  for (const auto& [key, value] : entry()["metadata"].items()) {
    if (value.is_number_integer())
      metadata.set_integer(key, value.get<int64_t>());
    else if (value.is_number())
      metadata.set_number(key, value.get<double>());
    else if (value.is_boolean())
      metadata.set_flag(key, value.get<bool>());
    else
      metadata.set_text(key, value.get<std::string>());
  }
  const auto theirs = folder_ / "theirs.gguf";
  testing::write_gguf_file(theirs, metadata, testing::gguf_contents(path_).second);
  if (GetParam() == "glm4_chat") return;  // its metadata contradict its tensors: heads of 8 in a hidden size of 32

  const double difference = this->difference(theirs);
  const auto lost = kLost.find(GetParam());
  std::cout << "[ figure   ] " << GetParam() << ": largest difference " << difference
            << (lost == kLost.end() ? "" : " (the file does not hold: " + lost->second + ")") << "\n";
  if (lost == kLost.end()) {
    EXPECT_LE(difference, kTolerance);
  }
}

// With the original configuration kept in the file nothing is lost.
TEST_P(GgufLlamaCpp, OurFilesGiveTheRecordedLogits) {
  (void)write_gguf(*open_checkpoint(fixture_.string()), path_, {.type = GgmlType::kF32});
  EXPECT_LE(difference(path_), kTolerance);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, GgufLlamaCpp, ::testing::ValuesIn(names()),
                         [](const auto& info) { return info.param; });

}  // namespace gguf_llama_cpp_test
}  // namespace emend::models
