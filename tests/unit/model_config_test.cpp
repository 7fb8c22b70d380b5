// config.json: both spellings, defaults, and everything that can be wrong with it.
#include <emend/core/error.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/debug_models.h"
#include "support/error_of.h"

namespace emend::models {
namespace model_config_test {

using Json = nlohmann::json;

Json llama() {
  return Json::parse(R"({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                         "intermediate_size": 56, "vocab_size": 101, "max_position_embeddings": 64})");
}

std::string error_of(const Json& config, ErrorClass expected = ErrorClass::kCorruption) {
  const std::string what = testing::error_of([&] { (void)parse_config(config, "some/config.json"); }, expected);
  EXPECT_NE(what.find("some/config.json"), std::string::npos) << what << config;
  return what;
}

TEST(Config, FillsInDefaults) {
  const ModelConfig config = parse_config(llama(), "x");
  EXPECT_EQ(config.n_kv_heads, 4);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.norm_eps, 1e-6);
  EXPECT_FALSE(config.tied_head);
  EXPECT_EQ(config.rotary(0).theta, 10000);
  EXPECT_EQ(config.rotary(0).dims, 8);
  EXPECT_DOUBLE_EQ(config.attention_scale, 1 / std::sqrt(8.0));
  EXPECT_TRUE(config.eos_ids.empty());
}

TEST(Config, NullMeansDefault) {
  Json config = llama();
  for (const char* key : {"num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "attention_bias",
                          "eos_token_id", "rms_norm_eps"})
    config[key] = nullptr;
  EXPECT_EQ(arithmetic(parse_config(config, "x")), arithmetic(parse_config(llama(), "x")));
}

TEST(Config, BothSpellingsOfRotaryAgree) {
  Json old = llama(), fresh = llama();
  old["rope_theta"] = 500000.0;
  old["rope_scaling"] = {{"type", "llama3"}, {"factor", 8}, {"original_max_position_embeddings", 16}};
  fresh["rope_parameters"] = {
      {"rope_type", "llama3"}, {"factor", 8.0}, {"original_max_position_embeddings", 16}, {"rope_theta", 500000}};
  EXPECT_EQ(arithmetic(parse_config(old, "x")), arithmetic(parse_config(fresh, "x")));
  fresh["rope_parameters"]["factor"] = 4.0;
  EXPECT_NE(arithmetic(parse_config(old, "x")), arithmetic(parse_config(fresh, "x")));
}

TEST(Config, RotarySettingsAreReadAsTransformersReadsThem) {
  const auto with = [](const Json& more) {
    Json config = llama();
    config.update(more);
    return parse_config(config, "x");
  };
  // rope_scaling takes the place of rope_parameters, which users do not think of.
  const Json fresh = {{"rope_type", "default"}, {"rope_theta", 20000.0}};
  const Json linear = {{"rope_type", "linear"}, {"factor", 4.0}};
  Json whole = linear;
  whole["rope_theta"] = 20000.0;
  EXPECT_EQ(arithmetic(with({{"rope_parameters", fresh}, {"rope_scaling", whole}})),
            arithmetic(with({{"rope_parameters", whole}})));
  EXPECT_EQ(arithmetic(with({{"rope_parameters", fresh}, {"rope_scaling", Json::object()}})),
            arithmetic(with({{"rope_parameters", fresh}})));
  Json lost = llama();
  lost.erase("rope_theta");
  lost.update({{"rope_parameters", fresh}, {"rope_scaling", linear}});
  EXPECT_NE(error_of(lost).find("copy it there"), std::string::npos) << error_of(lost);
  // The trained length at the top level wins; of dynamic scaling it is that of the model.
  const Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 8}};
  EXPECT_EQ(with({{"rope_scaling", yarn}, {"original_max_position_embeddings", 16}}).rotary(0).original_max, 16);
  EXPECT_EQ(with({{"rope_scaling", yarn}}).rotary(0).original_max, 8);
  const Json dynamic = {{"rope_type", "dynamic"}, {"factor", 4.0}, {"original_max_position_embeddings", 8}};
  const auto config = with({{"rope_scaling", dynamic}});
  EXPECT_EQ(config.rotary(0).original_max, config.max_positions);
  Json zero = yarn;
  zero.update({{"mscale", 1.0}, {"mscale_all_dim", 0}});
  EXPECT_FALSE(with({{"rope_scaling", zero}}).rotary(0).mscale_all_dim.has_value());
  const std::vector<double> ones(4, 1.0);
  Json longrope = {{"rope_type", "longrope"},
                   {"short_factor", ones},
                   {"long_factor", ones},
                   {"original_max_position_embeddings", 16}};
  const double ratio = static_cast<double>(config.max_positions) / 16;
  EXPECT_DOUBLE_EQ(with({{"rope_scaling", longrope}}).rotary(0).factor, ratio);
  const auto factor_of = [&] { return arithmetic(with({{"rope_scaling", longrope}}))["rotaries"][0]["factor"]; };
  EXPECT_EQ(factor_of(), 1.0) << "what fingerprints of earlier packs say";
  longrope["factor"] = 3.0;
  EXPECT_EQ(factor_of(), 3.0);
  EXPECT_DOUBLE_EQ(with({{"rope_scaling", longrope}}).rotary(0).factor, 3);
}

TEST(Config, ReadsEosAsNumberOrList) {
  Json config = llama();
  config["eos_token_id"] = 7;
  EXPECT_EQ(parse_config(config, "x").eos_ids, (std::vector<int64_t>{7}));
  config["eos_token_id"] = {5, 6};
  EXPECT_EQ(parse_config(config, "x").eos_ids, (std::vector<int64_t>{5, 6}));
  config["eos_token_id"] = {5, "six"};
  EXPECT_NE(error_of(config).find("eos_token_id"), std::string::npos);
}

TEST(Config, RefusesWhatIsNotAnObject) {
  for (const char* text : {"[]", "7", "\"llama\"", "null"})
    EXPECT_NE(error_of(Json::parse(text)).find("object"), std::string::npos);
}

TEST(Config, WindowsFollowEachFamilysRule) {
  Json qwen = testing::debug_config("qwen2");
  qwen["sliding_window"] = 4;  // published files carry it unused
  EXPECT_EQ(parse_config(qwen, "x").windows, (std::vector<int64_t>{0, 0, 0}));
  qwen["use_sliding_window"] = true;
  qwen["max_window_layers"] = 2;
  EXPECT_EQ(parse_config(qwen, "x").windows, (std::vector<int64_t>{0, 0, 4}));
  Json mistral = testing::debug_config("mistral");
  mistral["sliding_window"] = nullptr;
  EXPECT_EQ(parse_config(mistral, "x").window(0), 0);
  mistral.erase("sliding_window");
  EXPECT_EQ(parse_config(mistral, "x").window(0), 4096);
  Json gemma = testing::debug_config("gemma3");
  EXPECT_EQ(parse_config(gemma, "x").windows, (std::vector<int64_t>{4, 4, 0, 4}));
  gemma["layer_types"] = {"full_attention", "sliding_attention", "full_attention"};
  EXPECT_NE(error_of(gemma).find("layer_types"), std::string::npos);
  gemma["layer_types"] = {"full_attention", "sliding_attention", "full_attention", "chunked_attention"};
  EXPECT_NE(error_of(gemma, ErrorClass::kUnsupported).find("chunked"), std::string::npos);
}

TEST(Config, GemmaFilesOfTransformers4MeanTheTanhForm) {
  Json config = testing::debug_config("gemma");
  config["hidden_act"] = "gelu";
  EXPECT_EQ(parse_config(config, "x").activation, Activation::kGeluTanh);
  config["transformers_version"] = "5.17.0";
  EXPECT_EQ(parse_config(config, "x").activation, Activation::kGelu);
}

TEST(Config, ReadsTheTextPartOfAMultimodalConfiguration) {
  Json text = testing::debug_config("gemma3");
  text.erase("vocab_size");
  const ModelConfig config =
      parse_config({{"model_type", "gemma3"}, {"text_config", text}, {"eos_token_id", {1, 106}}}, "x");
  EXPECT_EQ(config.vocab_size, 262208);
  EXPECT_EQ(config.hidden_size, 24);
  EXPECT_EQ(config.eos_ids, (std::vector<int64_t>{1, 106}));
}

TEST(ModuleNames, AcceptsWhatTheHyperParameterFilesWrite) {
  const auto check = [](const char* family, const NamedModules& names, bool tied = false) {
    Json config = testing::debug_config(family);
    if (tied) config["tie_word_embeddings"] = true;
    check_module_names(family_named(family), parse_config(config, "x"), names,
                       [](const char*) { return std::string("file.yaml"); });
  };
  check("gpt2", {"transformer.h.{}", "transformer.h.{}.attn", "transformer.h.{}.mlp", "transformer.h.{}.mlp.c_proj",
                 "transformer.ln_f", "transformer.wte"});
  check("gpt2", {"h.{}", "", "", "h.{}.mlp.c_proj", "ln_f", "lm_head"});
  check("llama", {"model.layers.{}", "", "", "", "model.norm", "lm_head"});
  check("llama", {"", "", "", "", "", "model.embed_tokens"}, true);
  check("opt",
        {"model.decoder.layers.{}", "", "model.decoder.layers.{}.fc2", "model.decoder.layers.{}.fc2", "", "lm_head"});
  check("chatglm", {"", "", "", "", "", "transformer.output_layer"});
  EXPECT_THROW(check("llama", {"", "", "", "", "", "model.embed_tokens"}), Error);  // not tied
  const std::string text = testing::error_of(
      [&] {
        check("llama", {"transformer.h.{}", "", "", "", "", ""});
      },
      ErrorClass::kInvalidArgument);
  for (const char* part : {"file.yaml: layer_module_tmp", "transformer.h.{}", "model.layers.{}"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

}  // namespace model_config_test
}  // namespace emend::models
