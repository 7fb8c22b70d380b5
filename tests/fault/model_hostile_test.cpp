// Malformed configurations and tensors of every family: the error names file, key or tensor, what was got and expected;
// nothing crashes, hangs or takes the machine's memory.
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/safetensors.h>
#include <emend/models/config.h>
#include <gtest/gtest.h>

#include <chrono>

#include "support/debug_models.h"
#include "support/temporary_folder.h"

namespace emend::models {
namespace model_hostile_test {

using Json = nlohmann::json;
using testing::FamilyFlavour;
using Tensors = NamedTensors;

constexpr const char* kFile = "some/config.json";

struct Outcome {
  std::optional<ErrorClass> error;  // absent: accepted
  std::string text;
};

template <class Run>
Outcome outcome_of(const Run& run) {
  try {
    run();
  } catch (const Error& error) {
    return {error.error_class(), error.what()};
  }
  return {};
}

Outcome parsed(const Json& config) {
  return outcome_of([&] { (void)parse_config(config, kFile); });
}

void expect_words(const Outcome& outcome, ErrorClass expected, const std::vector<std::string>& words,
                  const std::string& what) {
  ASSERT_TRUE(outcome.error.has_value()) << "accepted: " << what;
  EXPECT_EQ(*outcome.error, expected) << what << ": " << outcome.text;
  for (const auto& word : words)
    EXPECT_NE(outcome.text.find(word), std::string::npos)
        << "no \"" << word << "\" for " << what << ": " << outcome.text;
}

// The name under which this configuration has a setting.
std::string spelled(const Json& config, const ConfigKeys::Names& names) {
  for (const auto& name : names)
    if (config.contains(name)) return name;
  return names.empty() ? "" : names.front();
}

class Hostile : public ::testing::TestWithParam<FamilyFlavour> {
 protected:
  const FamilySpec& family_ = family_named(GetParam().family);
  Json config_ = testing::debug_config(GetParam().family, GetParam().flavour);

  // What is read as a size: the names that config.json may have for it.
  [[nodiscard]] std::vector<ConfigKeys::Names> sizes() const {
    const auto& keys = family_.keys;
    std::vector<ConfigKeys::Names> names = {keys.hidden, keys.layers, keys.heads, keys.vocab};
    if (keys.mlp_width_factor == 0) names.push_back(keys.mlp_width);
    if (keys.default_max_positions == 0) names.push_back(keys.max_positions);
    return names;
  }
  [[nodiscard]] Tensors tensors() const { return tensors_of(*random_checkpoint(config_, 3)); }
  [[nodiscard]] static Outcome loaded(const Json& config, const Tensors& tensors) {
    return outcome_of([&] { (void)load_model(std::make_shared<MemoryCheckpoint>(config, tensors, "some/model")); });
  }
};

TEST_P(Hostile, SizesThatAreNotPositiveIntegers) {
  for (const auto& names : sizes()) {
    const std::string key = spelled(config_, names);
    for (const char* value : {"\"32\"", "\"many\"", "-3", "0", "1.5", "true", "[32]", "{}", "1e300",
                              "9223372036854775808", "18446744073709551615", "-9223372036854775808", "2147483649"}) {
      Json config = config_;
      config[key] = Json::parse(value);
      expect_words(parsed(config), ErrorClass::kCorruption, {kFile, key, "integer"}, key + " = " + value);
    }
    for (const bool null : {false, true}) {
      Json config = config_;
      for (const auto& name : names) config.erase(name);
      if (null) config[key] = nullptr;
      expect_words(parsed(config), ErrorClass::kCorruption, {kFile, names.front(), "missing", "integer"}, key);
    }
  }
}

TEST_P(Hostile, KeysThatAreMissingOrIllTyped) {
  ASSERT_FALSE(parsed(config_).error) << parsed(config_).text;
  int refused = 0;
  for (const auto& [key, value] : config_.items()) {
    for (const Json& wrong : {Json("text"), Json(-3), Json(0), Json(1.5), Json(true), Json(Json::array({1})),
                              Json(Json::object({{"a", 1}})), Json(1e300), Json(uint64_t{1} << 63)}) {
      Json config = config_;
      config[key] = wrong;
      const Outcome outcome = parsed(config);
      refused += outcome.error.has_value();
      EXPECT_EQ(outcome.error.has_value(), !outcome.text.empty());
    }
    Json without = config_;
    without.erase(key);
    const Outcome outcome = parsed(without);
    EXPECT_TRUE(!outcome.error || outcome.text.find(key) != std::string::npos) << outcome.text;
  }
  EXPECT_GT(refused, 20);
}

TEST_P(Hostile, HeadsThatDoNotDivide) {
  const auto& keys = family_.keys;
  const std::string heads = spelled(config_, keys.heads), hidden = spelled(config_, keys.hidden);
  if (!config_.contains(spelled(config_, keys.head_dim)) && keys.default_head_dim == 0) {
    Json config = config_;
    config[hidden] = config[heads].get<int>() * 8 + 1;
    expect_words(parsed(config), ErrorClass::kCorruption, {kFile, heads, "divisor of", hidden}, "hidden size");
  }
  if (!keys.kv_heads.empty() && config_.contains(keys.kv_heads.front())) {
    Json config = config_;
    config[keys.kv_heads.front()] = config[heads].get<int>() + 1;
    expect_words(parsed(config), ErrorClass::kCorruption, {kFile, keys.kv_heads.front(), "divisor of"}, "kv heads");
  }
}

TEST_P(Hostile, RotarySettings) {
  if (parse_config(config_, kFile).positions != Positions::kRotary) return;
  if (family_.name == "chatglm" || family_.name == "qwen" || family_.name == "gptj") return;  // none but numbers
  struct Case {
    const char* value;
    ErrorClass error;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {R"("linear")", ErrorClass::kCorruption, {"object"}},
      {R"([{"rope_type": "linear", "factor": 2}])", ErrorClass::kCorruption, {"object"}},
      {R"(4)", ErrorClass::kCorruption, {"object"}},
      {R"({"rope_type": 4, "factor": 2})", ErrorClass::kCorruption, {"rope_type", "string"}},
      {R"({"type": "mrope", "factor": 2})", ErrorClass::kUnsupported, {"rope_type", "mrope", "llama3"}},
      {R"({"rope_type": "Linear", "factor": 2})", ErrorClass::kUnsupported, {"Linear"}},
      {R"({"rope_type": "linear"})", ErrorClass::kCorruption, {"factor", "missing"}},
      {R"({"rope_type": "linear", "factor": "2"})", ErrorClass::kCorruption, {"factor", "\"2\""}},
      {R"({"rope_type": "linear", "factor": 0})", ErrorClass::kCorruption, {"factor", "positive"}},
      {R"({"rope_type": "linear", "factor": -2})", ErrorClass::kCorruption, {"factor", "-2"}},
      {R"({"rope_type": "dynamic", "factor": null})", ErrorClass::kCorruption, {"factor"}},
      {R"({"rope_type": "llama3", "factor": 8})", ErrorClass::kCorruption, {"original_max_position_embeddings"}},
      {R"({"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 8, "low_freq_factor": 4,
           "high_freq_factor": 4})",
       ErrorClass::kCorruption,
       {"high_freq_factor"}},
      {R"({"rope_type": "longrope", "short_factor": [1], "long_factor": [], "original_max_position_embeddings": 8})",
       ErrorClass::kCorruption,
       {"_factor", "half the rotated dimensions"}},
      {R"({"rope_type": "longrope", "original_max_position_embeddings": 8})",
       ErrorClass::kCorruption,
       {"short_factor"}},
      {R"({"rope_type": "default", "rope_theta": 0})", ErrorClass::kCorruption, {"rope_theta"}},
      {R"({"rope_type": "default", "rope_theta": "1e4"})", ErrorClass::kCorruption, {"rope_theta"}},
      {R"({"rope_type": "default", "rope_theta": 0.5})", ErrorClass::kCorruption, {"rope_theta", "above 1"}},
      {R"({"rope_type": "default", "partial_rotary_factor": 1e300})",
       ErrorClass::kCorruption,
       {"partial_rotary_factor"}},
      {R"({"rope_type": "default", "partial_rotary_factor": 1.5})", ErrorClass::kCorruption, {"partial_rotary_factor"}},
      {R"({"rope_type": "default", "partial_rotary_factor": 0.001})", ErrorClass::kCorruption, {"rotary"}},
  };
  for (const auto& wrong : cases)
    for (const std::string key : {"rope_parameters", "rope_scaling"}) {
      Json config = config_;
      config.erase("rope_parameters");
      config.erase("rope_scaling");
      config.erase("original_max_position_embeddings");
      config[key] = Json::parse(wrong.value);
      if (family_.name == "gemma3" && key == "rope_parameters" && config[key].is_object())
        config[key] = {{"full_attention", config[key]}, {"sliding_attention", {{"rope_type", "default"}}}};
      std::vector<std::string> words = wrong.words;
      words.push_back(kFile);
      words.push_back(key);
      if (family_.keys.yarn_means_longrope && config[key].is_object() &&
          (words[0] == "original_max_position_embeddings"))
        continue;
      expect_words(parsed(config), wrong.error, words, key + " = " + wrong.value);
    }
}

// Within the range of integers and still absurd: an error about the tensors, at once.
TEST_P(Hostile, HugeSizesAreRefusedAtOnce) {
  const auto all = tensors();
  const auto begin = std::chrono::steady_clock::now();
  for (const auto& [key, value] : config_.items()) {
    if (!value.is_number_integer()) continue;
    for (const int64_t huge : {int64_t{1} << 31, (int64_t{1} << 31) - 8, int64_t{1} << 20}) {
      Json config = config_;
      config[key] = huge;
      const Outcome outcome = loaded(config, all);
      EXPECT_EQ(outcome.text.find("internal"), std::string::npos) << outcome.text;
    }
  }
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 20);
}

TEST_P(Hostile, EveryTensorMissingMisshapenOrOfAnotherType) {
  const auto all = tensors();
  const auto expected = expected_tensors(family_, parse_config(config_, kFile));
  ASSERT_FALSE(loaded(config_, all).error) << loaded(config_, all).text;
  for (size_t i = 0; i < all.size(); ++i) {
    const auto with = [&](const at::Tensor& value) {
      Tensors changed = all;
      changed[i].second = value;
      return loaded(config_, changed);
    };
    const std::string& name = all[i].first;
    const at::Tensor& value = all[i].second;
    Tensors missing = all;
    missing.erase(missing.begin() + static_cast<long>(i));
    expect_words(loaded(config_, missing), ErrorClass::kCorruption, {"some/model", name}, name + " missing");
    std::ostringstream shape;
    shape << value.sizes();
    std::vector<int64_t> longer(value.sizes().begin(), value.sizes().end());
    ++longer.front();
    for (const auto& wrong : {at::zeros(longer), value.unsqueeze(0), at::zeros({0}), at::zeros({})})
      expect_words(with(wrong), ErrorClass::kCorruption, {"some/model", name, shape.str()}, name + " misshapen");
    if (value.dim() == 2 && value.size(0) != value.size(1))
      expect_words(with(value.t().contiguous()), ErrorClass::kCorruption, {name, shape.str()}, name + " transposed");
    expect_words(with(at::zeros({1, 2, 3})), ErrorClass::kCorruption, {name, "[1, 2, 3]"}, name + " misshapen");
    for (const auto type : {at::kChar, at::kLong, at::kBool})
      expect_words(with(at::zeros(value.sizes(), type)), ErrorClass::kUnsupported,
                   {name, "float32, float16 or bfloat16", "quantised"}, name + " of integers");
    for (const float number : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      at::Tensor changed = value.clone();
      changed.view(-1)[0] = number;
      expect_words(with(changed), ErrorClass::kCorruption, {name, "not finite"}, name + " not finite");
    }
  }
  for (const char* extra : {"model.layers.0.extra.weight", "weight", "", "transformer.h.99.mlp.c_proj.weight",
                            "model.layers.1e3.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight.lora_A"}) {
    Tensors more = all;
    more.emplace_back(extra, at::zeros({2}));
    expect_words(loaded(config_, more), ErrorClass::kUnsupported, {"some/model", extra, family_.name}, extra);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Hostile, ::testing::ValuesIn(testing::all_flavours()), testing::flavour_name);

// Settings that only some families have.
TEST(HostileConfig, SettingsOfOneFamily) {
  struct Case {
    const char *family, *key, *value;
    ErrorClass error;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {"llama",
       "model_type",
       "\"llama5\"",
       ErrorClass::kUnsupported,
       {"model_type", "llama5", "did you mean \"llama\""}},
      {"llama", "model_type", "\"\"", ErrorClass::kUnsupported, {"model_type"}},
      {"llama", "model_type", "7", ErrorClass::kCorruption, {"model_type", "string"}},
      {"llama", "model_type", "null", ErrorClass::kCorruption, {"model_type", "missing"}},
      {"llama", "model_type", "[\"llama\"]", ErrorClass::kCorruption, {"model_type"}},
      {"llama", "model_type", "\"lama\"", ErrorClass::kUnsupported, {"did you mean \"llama\"?"}},
      {"llama", "num_hidden_layers", "1000000", ErrorClass::kCorruption, {"at most 10000 layers"}},
      {"llama", "num_attention_heads", "5", ErrorClass::kCorruption, {"num_attention_heads", "divisor"}},
      {"llama", "num_key_value_heads", "3", ErrorClass::kCorruption, {"divisor"}},
      {"llama", "head_dim", "7", ErrorClass::kCorruption, {"rotary dimensions"}},
      {"llama", "head_dim", "1", ErrorClass::kCorruption, {"rotary dimensions"}},
      {"llama", "rms_norm_eps", "0", ErrorClass::kCorruption, {"positive"}},
      {"llama", "rms_norm_eps", "1e308", ErrorClass::kCorruption, {"such as 1e-5"}},
      {"llama", "rope_theta", "-5", ErrorClass::kCorruption, {"rope_theta"}},
      {"llama", "rope_theta", "1", ErrorClass::kCorruption, {"rope_theta", "above 1"}},
      {"llama",
       "rope_scaling",
       R"({"type": "longrope", "short_factor": "no", "long_factor": [1], "original_max_position_embeddings": 8})",
       ErrorClass::kCorruption,
       {"short_factor"}},
      {"phi", "qk_layernorm", "true", ErrorClass::kUnsupported, {"qk_layernorm"}},
      {"llama", "hidden_act", "7", ErrorClass::kCorruption, {"hidden_act", "string"}},
      {"llama", "hidden_act", "\"tanh\"", ErrorClass::kUnsupported, {"hidden_act", "tanh", "silu"}},
      {"llama", "attention_bias", "\"yes\"", ErrorClass::kCorruption, {"attention_bias", "true or false"}},
      {"llama", "attention_bias", "1", ErrorClass::kCorruption, {"attention_bias"}},
      {"llama", "rms_norm_eps", "-1e-6", ErrorClass::kCorruption, {"rms_norm_eps", "positive"}},
      {"llama", "rms_norm_eps", "\"1e-6\"", ErrorClass::kCorruption, {"rms_norm_eps"}},
      {"llama", "tie_word_embeddings", "\"false\"", ErrorClass::kCorruption, {"tie_word_embeddings"}},
      {"llama", "tie_word_embeddings", "1", ErrorClass::kCorruption, {"true or false"}},
      {"llama", "eos_token_id", "\"</s>\"", ErrorClass::kCorruption, {"eos_token_id", "integer"}},
      {"llama", "eos_token_id", "[2, null]", ErrorClass::kCorruption, {"eos_token_id"}},
      {"llama", "eos_token_id", "{\"id\": 2}", ErrorClass::kCorruption, {"eos_token_id"}},
      {"llama", "eos_token_id", "2.5", ErrorClass::kCorruption, {"eos_token_id"}},
      {"llama", "quantization_config", "{\"quant_method\": \"awq\"}", ErrorClass::kUnsupported, {"quantised"}},
      {"gemma3", "layer_types", "[\"full_attention\"]", ErrorClass::kCorruption, {"layer_types", "1 entries", "4"}},
      {"gemma3", "layer_types", "\"full_attention\"", ErrorClass::kCorruption, {"layer_types", "list"}},
      {"gemma3", "layer_types", "[1, 2, 3, 4]", ErrorClass::kCorruption, {"layer_types"}},
      {"gemma2",
       "layer_types",
       "[\"mamba\", \"mamba\", \"mamba\"]",
       ErrorClass::kUnsupported,
       {"layer_types", "mamba"}},
      {"gemma3", "sliding_window", "-4", ErrorClass::kCorruption, {"sliding_window"}},
      {"gemma3", "sliding_window", "0", ErrorClass::kCorruption, {"sliding_window"}},
      {"gemma3", "rope_local_base_freq", "-1", ErrorClass::kCorruption, {"rope_local_base_freq"}},
      {"gemma2", "query_pre_attn_scalar", "0", ErrorClass::kCorruption, {"query_pre_attn_scalar"}},
      {"gemma2", "final_logit_softcapping", "-30", ErrorClass::kCorruption, {"final_logit_softcapping"}},
      {"gemma2", "attn_logit_softcapping", "\"50\"", ErrorClass::kCorruption, {"attn_logit_softcapping"}},
      {"mixtral", "num_local_experts", "0", ErrorClass::kCorruption, {"num_local_experts"}},
      {"mixtral", "num_local_experts", "2147483648", ErrorClass::kCorruption, {"num_local_experts"}},
      {"mixtral", "num_experts_per_tok", "9", ErrorClass::kCorruption, {"num_experts_per_tok", "num_local_experts"}},
      {"chatglm", "multi_query_group_num", "3", ErrorClass::kCorruption, {"multi_query_group_num"}},
      {"chatglm", "rope_ratio", "0", ErrorClass::kCorruption, {"rope_ratio"}},
      {"chatglm", "rmsnorm", "false", ErrorClass::kUnsupported, {"rmsnorm"}},
      {"chatglm", "quantization_bit", "4", ErrorClass::kUnsupported, {"quantization_bit"}},
      {"qwen", "intermediate_size", "77", ErrorClass::kCorruption, {"intermediate_size", "even"}},
      {"qwen", "seq_length", "0", ErrorClass::kCorruption, {"seq_length"}},
      {"falcon", "num_ln_in_parallel_attn", "\"two\"", ErrorClass::kCorruption, {"num_ln_in_parallel_attn"}},
      {"falcon", "alibi", "\"no\"", ErrorClass::kCorruption, {"alibi"}},
      {"gptj", "rotary_dim", "-2", ErrorClass::kCorruption, {"rotary_dim"}},
      {"gptj", "rotary_dim", "3", ErrorClass::kCorruption, {"rotary"}},
      {"gptj", "rotary_dim", "1000", ErrorClass::kCorruption, {"rotary"}},
      {"gpt_neox", "rotary_pct", "-0.25", ErrorClass::kCorruption, {"rotary_pct"}},
      {"gpt_neox", "rotary_pct", "2", ErrorClass::kCorruption, {"rotary_pct"}},
      {"gpt_neox", "rotary_emb_base", "0", ErrorClass::kCorruption, {"rotary_emb_base"}},
      {"opt", "do_layer_norm_before", "\"true\"", ErrorClass::kCorruption, {"do_layer_norm_before"}},
      {"opt", "word_embed_proj_dim", "0", ErrorClass::kCorruption, {"word_embed_proj_dim"}},
      {"gpt2", "n_inner", "\"4x\"", ErrorClass::kCorruption, {"n_inner"}},
      {"gpt2", "scale_attn_weights", "3", ErrorClass::kCorruption, {"scale_attn_weights"}},
      {"qwen2", "max_window_layers", "-1", ErrorClass::kCorruption, {"max_window_layers"}},
  };
  for (const auto& wrong : cases) {
    Json config = testing::debug_config(wrong.family);
    if (std::string(wrong.key) == "max_window_layers") config["use_sliding_window"] = true;
    config[wrong.key] = Json::parse(wrong.value);
    std::vector<std::string> words = wrong.words;
    words.push_back(kFile);
    expect_words(parsed(config), wrong.error, words,
                 std::string(wrong.family) + ": " + wrong.key + " = " + wrong.value);
  }
}

// Of several weight files the message names the one that holds the tensor, or the index that should list it.
TEST(HostileTensors, TheFileIsNamed) {
  namespace fs = std::filesystem;
  const testing::TemporaryFolder temporary("model_hostile_files");
  const auto& folder = temporary.path();
  const Json config = testing::debug_config("llama");
  const auto checkpoint = random_checkpoint(config, 1);
  write_file(folder / "config.json", config.dump());
  // Puts "model.norm.weight" with this value into the second file, everything else into the first.
  const auto load_with = [&](const std::optional<at::Tensor>& norm) {
    Tensors first, second;
    Json index = {{"weight_map", Json::object()}};
    for (const TensorInfo& info : checkpoint->tensors()) {
      const bool moved = info.name == "model.norm.weight";
      if (moved && !norm) continue;
      (moved ? second : first).emplace_back(info.name, moved ? *norm : checkpoint->read(info.name));
      index["weight_map"][info.name] = moved ? "model-00002-of-00002.safetensors" : "model-00001-of-00002.safetensors";
    }
    write_safetensors(folder / "model-00001-of-00002.safetensors", first);
    write_safetensors(folder / "model-00002-of-00002.safetensors", second);
    write_file(folder / "model.safetensors.index.json", index.dump());
    return outcome_of([&] { (void)load_model(folder.string()); });
  };
  const at::Tensor norm = checkpoint->read("model.norm.weight");
  EXPECT_FALSE(load_with(norm).error) << load_with(norm).text;
  expect_words(load_with(at::zeros({7})), ErrorClass::kCorruption,
               {"model-00002-of-00002.safetensors", "model.norm.weight", "[7]", "[32]"}, "shape");
  expect_words(load_with(at::zeros({32}, at::kInt)), ErrorClass::kUnsupported,
               {"model-00002-of-00002.safetensors", "model.norm.weight", "Int"}, "dtype");
  expect_words(load_with(norm / 0), ErrorClass::kCorruption,
               {"model-00002-of-00002.safetensors", "model.norm.weight", "not finite"}, "values");
  expect_words(load_with(std::nullopt), ErrorClass::kCorruption,
               {"model.safetensors.index.json", "missing", "model.norm.weight"}, "missing");
  (void)load_with(norm);
  fs::remove(folder / "model-00002-of-00002.safetensors");
  fs::create_symlink("model-00002-of-00002.safetensors", folder / "model-00002-of-00002.safetensors");  // to itself
  expect_words(outcome_of([&] { (void)load_model(folder.string()); }), ErrorClass::kNotFound,
               {"model.safetensors.index.json", "model-00002-of-00002.safetensors"}, "a link to itself");
}

// Text that is no JSON, although Python's json module writes it.
TEST(HostileConfig, FilesThatAreNotJson) {
  const testing::TemporaryFolder temporary("model_hostile");
  const auto& folder = temporary.path();
  const Json config = testing::debug_config("llama");
  write_folder(*random_checkpoint(config, 1), folder);
  std::string text = config.dump();
  for (const std::string wrong : {"NaN", "Infinity", "-Infinity", "0x20", "1_000", "+5", "'a'", "None", "\"\\ud800"}) {
    write_file(folder / "config.json", text.substr(0, text.size() - 1) + ", \"rope_theta\": " + wrong + "}");
    expect_words(outcome_of([&] { (void)load_model(folder.string()); }), ErrorClass::kCorruption, {"config.json:1:"},
                 wrong);
  }
  write_file(folder / "config.json", text.substr(0, text.size() - 1) + ", \"rope_theta\": 1e999}");
  expect_words(outcome_of([&] { (void)load_model(folder.string()); }), ErrorClass::kCorruption, {"config.json"},
               "1e999");
  write_file(folder / "config.json", std::string(200000, '['));
  expect_words(outcome_of([&] { (void)load_model(folder.string()); }), ErrorClass::kCorruption,
               {"config.json:1:101", "more than 100 levels"}, "deep");
}

}  // namespace model_hostile_test
}  // namespace emend::models
