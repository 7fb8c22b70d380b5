// Sizes of published models: they parse, and they have the parameters that are known of them.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/models/config.h>
#include <emend/models/published_shapes.h>
#include <gtest/gtest.h>

#include <map>

#include "support/error_of.h"

namespace emend::models {
namespace published_shapes_test {

TEST(PublishedShapes, HaveThePublishedNumberOfParameters) {
  const std::map<std::string, double> billions = {{"gpt2", 0.124439808},         {"gpt2-xl", 1.557611200},
                                                  {"gpt-j-6b", 6.050882784},     {"gpt-neox-20b", 20.554567680},
                                                  {"smollm2-135m", 0.134515008}, {"llama-3.2-1b", 1.235814400},
                                                  {"llama-2-7b", 6.738415616},   {"llama-3-8b", 8.030261248},
                                                  {"mistral-7b", 7.241732096},   {"qwen2.5-7b", 7.615616512}};
  for (const auto& name : published_shape_names()) {
    ASSERT_TRUE(billions.contains(name)) << name;
    int64_t parameters = 0;
    const auto weights = random_weights(published_shape(name), name, 0);
    for (const auto& tensor : weights->tensors()) parameters += static_cast<int64_t>(tensor.bytes / 4);
    EXPECT_NEAR(static_cast<double>(parameters), 1e9 * billions.at(name), 2e-3 * 1e9 * billions.at(name)) << name;
  }
}

TEST(PublishedShapes, CanBeCutAndNamed) {
  EXPECT_EQ(parse_config(published_shape("gpt-j-6b", 3), "x").n_layers, 3);
  EXPECT_EQ(parse_config(published_shape("llama-3-8b", 2), "x").n_layers, 2);
  const auto narrow = parse_config(published_shape("smollm2-135m", 2, 192), "x");
  EXPECT_EQ(narrow.hidden_size, 192);
  EXPECT_EQ(narrow.n_heads, 3);
  EXPECT_EQ(narrow.n_kv_heads, 1);
  EXPECT_EQ(narrow.head_dim, 64);
  EXPECT_EQ(narrow.mlp_width, 512);
  EXPECT_EQ(parse_config(published_shape("gpt2", 0, 128), "x").n_heads, 2);
  EXPECT_THROW((void)published_shape("smollm2-135m", 2, 200), Error);
  const std::string what = testing::error_of([] { (void)published_shape("llama-3-7b"); }, ErrorClass::kNotFound);
  EXPECT_NE(what.find("llama-"), std::string::npos) << what;
}

TEST(RandomWeights, AreMadeAnewEachTimeAndTheSame) {
  const auto one = random_weights(published_shape("smollm2-135m", 1), "a", 3),
             other = random_weights(published_shape("smollm2-135m", 1), "a", 3);
  const std::string name = "model.layers.0.mlp.down_proj.weight";
  const at::Tensor weight = one->read(name);
  EXPECT_TRUE(at::equal(weight, other->read(name)));
  EXPECT_FALSE(at::equal(weight, random_weights(published_shape("smollm2-135m", 1), "a", 4)->read(name)));
  EXPECT_NEAR(weight.std().item<double>(), 0.02, 0.001);
  const at::Tensor table = one->read("model.embed_tokens.weight");  // of many blocks
  EXPECT_LT((table.mm(table[0].unsqueeze(1)) > 0.5 * table[0].square().sum()).sum().item<int64_t>(), 2)
      << "rows repeat";
  EXPECT_TRUE(at::equal(one->read("model.norm.weight"), at::ones({576})));
  EXPECT_THROW((void)one->read("nothing"), Error);
}

}  // namespace published_shapes_test
}  // namespace emend::models
