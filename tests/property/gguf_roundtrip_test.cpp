// Every debug flavour of every family, to GGUF and back: same names, same values, same arithmetic, same logits.
#include <ATen/core/grad_mode.h>
#include <emend/models/gguf/detail/gguf_architecture.h>
#include <emend/models/gguf/gguf_checkpoint.h>
#include <emend/models/gguf/gguf_writer.h>
#include <gtest/gtest.h>

#include "support/debug_models.h"
#include "support/gguf_builder.h"

namespace emend::models {
namespace gguf_roundtrip_test {

using testing::FamilyFlavour;
using testing::TemporaryFolder;

// 1 + w - 1 in float32, for w around 1.
constexpr double kShiftRounding = 2.4e-7;

class GgufRoundTrip : public ::testing::TestWithParam<FamilyFlavour> {
 protected:
  void SetUp() override {
    config_ = parse_config(testing::debug_config(GetParam().family, GetParam().flavour), "debug");
    if (config_.family == "opt") GTEST_SKIP() << "GGUF has no architecture for OPT";
    checkpoint_ = random_checkpoint(testing::debug_config(GetParam().family, GetParam().flavour), 5);
  }

  TemporaryFolder folder_{"gguf_roundtrip_" + GetParam().family + GetParam().flavour};
  std::filesystem::path path_ = folder_ / "model.gguf";
  ModelConfig config_;
  std::shared_ptr<const Checkpoint> checkpoint_;
};

void expect_same_tensors(const Checkpoint& got, const Checkpoint& expected, bool shifted) {
  ASSERT_EQ(got.tensors().size(), expected.tensors().size());
  for (const auto& info : expected.tensors()) {
    const at::Tensor a = got.read(info.name), b = expected.read(info.name);
    ASSERT_EQ(a.sizes(), b.sizes()) << info.name;
    EXPECT_EQ(a.scalar_type(), at::kFloat) << info.name;
    EXPECT_LE((a - b).abs().max().item<double>(), shifted ? kShiftRounding : 0) << info.name;
  }
  for (const auto& info : got.tensors()) {
    EXPECT_EQ(got.read(info.name).sizes(), info.shape) << info.name;
    EXPECT_EQ(got.read(info.name).scalar_type(), info.dtype) << info.name;
  }
}

TEST_P(GgufRoundTrip, Float32ComesBackExactly) {
  const auto report = write_gguf(*checkpoint_, path_, {.type = GgmlType::kF32});
  EXPECT_EQ(report.bytes, std::filesystem::file_size(path_));
  const auto back = open_gguf_checkpoint(path_);
  EXPECT_EQ(back->format(), "gguf");
  EXPECT_EQ(back->config(), checkpoint_->config());
  expect_same_tensors(*back, *checkpoint_, false);
}

TEST_P(GgufRoundTrip, MetadataAloneGiveTheSameArithmetic) {
  if (config_.family == "falcon" && config_.residual == Residual::kSequential)
    GTEST_SKIP()
        << "llama.cpp has no Falcon with sequential blocks: such files are read by their kept configuration only";
  (void)write_gguf(*checkpoint_, path_, {.type = GgmlType::kF32, .keep_config = false});
  const auto back = open_gguf_checkpoint(path_);
  expect_same_tensors(*back, *checkpoint_, config_.norm_one_plus);
  auto got = arithmetic(parse_config(back->config(), "gguf")), expected = arithmetic(config_);
  // What GGUF has no place for (docs/formats/gguf.md).
  if (config_.family == "internlm") got["family"] = "internlm";                  // stored as Llama with biases
  if (config_.family == "qwen") got["attention"][3] = expected["attention"][3];  // log-n scaling of queries
  if (config_.normalised_head) got["ends"][3] = true;  // Baichuan 2 is told by its vocabulary size
  if (config_.positions == Positions::kAlibi) {        // told by the number of layers
    for (const char* key : {"positions", "rotaries", "rotary_of_layer"}) got[key] = expected[key];
  }
  for (size_t i = 0; i < expected["rotaries"].size(); ++i) {
    const Rotary& rotary = config_.rotaries[i];
    auto& r = got["rotaries"][i];
    if (rotary.kind == Rotary::Kind::kDynamic || rotary.kind == Rotary::Kind::kQwenNtk) r = expected["rotaries"][i];
    if (rotary.kind == Rotary::Kind::kDefault || rotary.kind == Rotary::Kind::kLinear)
      r["original"] = expected["rotaries"][i]["original"];
    if (rotary.kind == Rotary::Kind::kLongrope && !rotary.attention_factor)
      r["attention_factor"] = 0.0;  // the usual one, written out
  }
  for (size_t i = 0; i < expected["attention"].size(); ++i) {  // float32 in the file
    if (!expected["attention"][i].is_number_float()) continue;
    EXPECT_NEAR(got["attention"][i].get<double>(), expected["attention"][i].get<double>(), 1e-6);
    got["attention"][i] = expected["attention"][i];
  }
  got["block"][6] = expected["block"][6];  // the activation: exact or tanh GELU
  EXPECT_EQ(got, expected) << nlohmann::json::diff(expected, got).dump();
}

TEST_P(GgufRoundTrip, ScaledPositionsComeBackFromMetadataAlone) {
  const bool scales = config_.positions == Positions::kRotary && config_.family != "gptj" && config_.family != "qwen";
  if (!scales)
    GTEST_SKIP() << "positions are not rotary, or (GPT-J, Qwen v1) have no scaling in the reference: runs once the "
                    "reference of this family scales them";
  nlohmann::json config = checkpoint_->config();
  config.erase("rope_parameters");
  config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 4.0}};
  config[family_named(config_.family).keys.theta.front()] = 20000.0;
  (void)write_gguf(*random_checkpoint(config, 1), path_, {.type = GgmlType::kF32, .keep_config = false});
  const ModelConfig expected = parse_config(config, "config"),
                    got = parse_config(open_gguf_checkpoint(path_)->config(), "gguf");
  EXPECT_EQ(std::ranges::count(expected.rotaries, Rotary::Kind::kLinear, &Rotary::kind), 1);
  for (int l = 0; l < static_cast<int>(expected.n_layers); ++l) {
    EXPECT_EQ(got.rotary(l).kind, expected.rotary(l).kind);
    EXPECT_EQ(got.rotary(l).factor, expected.rotary(l).factor);
    EXPECT_EQ(got.rotary(l).dims, expected.rotary(l).dims);
    EXPECT_NEAR(got.rotary(l).theta, expected.rotary(l).theta, 1e-6 * expected.rotary(l).theta);
  }
}

TEST_P(GgufRoundTrip, TheLoadedModelComputesTheSame) {
  (void)write_gguf(*checkpoint_, path_, {.type = GgmlType::kF32});
  const Model before = load_model(checkpoint_), after = load_model(open_gguf_checkpoint(path_));
  const auto batch = TokenBatch::from_rows({{3, 17, 40, 2, 71, 9}, {8, 1, 2}});
  const at::NoGradGuard no_grad;
  const double difference = (before.forward(batch).logits - after.forward(batch).logits).abs().max().item<double>();
  EXPECT_EQ(difference, 0);
}

TEST_P(GgufRoundTrip, EveryTypeStaysWithinItsRounding) {
  const std::map<GgmlType, double> bounds = {{GgmlType::kF16, 6e-4},
                                             {GgmlType::kBF16, 4.5e-3},
                                             {GgmlType::kQ8_0, 0.012},
                                             {GgmlType::kQ6_K, 0.012},
                                             {GgmlType::kQ4_0, 0.2}};
  for (const auto& [type, bound] : bounds) {
    (void)write_gguf(*checkpoint_, path_, {.type = type});
    const auto back = open_gguf_checkpoint(path_);
    for (const auto& info : checkpoint_->tensors()) {
      const at::Tensor expected = checkpoint_->read(info.name), got = back->read(info.name).to(at::kFloat);
      EXPECT_LE((got - expected).norm().item<double>(), bound * expected.norm().item<double>() + 1e-6)
          << to_string(type) << " " << info.name;
    }
  }
}

TEST_P(GgufRoundTrip, ASecondTripChangesNothing) {
  (void)write_gguf(*checkpoint_, path_, {.type = GgmlType::kQ8_0});
  const auto copy = folder_ / "copy.gguf";
  (void)write_gguf(*open_gguf_checkpoint(path_), copy);
  EXPECT_EQ(read_file(copy), read_file(path_));
}

std::string test_name(const ::testing::TestParamInfo<FamilyFlavour>& info) {
  return info.param.family + "_" + info.param.flavour;
}
INSTANTIATE_TEST_SUITE_P(Families, GgufRoundTrip, ::testing::ValuesIn(testing::all_flavours()), test_name);

TEST(GgufFamilies, EveryFamilyButOptHasAnArchitecture) {
  for (const auto& family : all_families())
    for (const auto& type : family.model_types) {
      if (family.name == "opt") {
        EXPECT_THROW((void)detail::gguf_architecture_for(type, "x"), Error);
      } else {
        EXPECT_NO_THROW((void)detail::gguf_architecture_for(type, "x")) << type;
      }
    }
}

}  // namespace gguf_roundtrip_test
}  // namespace emend::models
