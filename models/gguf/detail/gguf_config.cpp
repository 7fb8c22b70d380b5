#include <emend/core/error.h>
#include <emend/models/detail/hf_checkpoint.h>
#include <emend/models/gguf/detail/gguf_config.h>
#include <emend/models/gguf/detail/gguf_rotary.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace emend::models::detail {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLargestSize = int64_t{1} << 31;
constexpr int64_t kMostLayers = 4096;

/// Spelling of the keys that nearly all families have; nullptr leaves one out.
struct Spelling {
  const char* hidden = "hidden_size";
  const char* layers = "num_hidden_layers";
  const char* heads = "num_attention_heads";
  const char* kv_heads = "num_key_value_heads";
  const char* head_dim = "head_dim";
  const char* mlp = "intermediate_size";
  const char* vocab = "vocab_size";
  const char* positions = "max_position_embeddings";
  const char* eps = "rms_norm_eps";
};

/// Reads one file's metadata into a config.json.
class Reader {
 public:
  Reader(const GgufFiles& files, const GgufArchitecture& architecture)
      : files_(files), meta_(files.metadata()), prefix_(architecture.name + ".") {
    hidden = size("embedding_length");
    layers = size("block_count") - integer("nextn_predict_layers").value_or(0);
    if (layers < 1 || layers > kMostLayers)
      meta_.fail_key(key("block_count"), std::to_string(layers), "1 to 4096 layers");
    heads = per_layer("attention.head_count").value_or(0);
    if (heads < 1 || heads > hidden)
      meta_.fail_key(key("attention.head_count"), std::to_string(heads), "1 to embedding_length");
    kv_heads = per_layer("attention.head_count_kv").value_or(heads);
    if (kv_heads < 1 || kv_heads > heads || heads % kv_heads != 0)
      meta_.fail_key(key("attention.head_count_kv"), std::to_string(kv_heads), "a divisor of " + std::to_string(heads));
    read_head_dim();
    mlp = dimension("blk.0.ffn_down.weight", 1).value_or(dimension("blk.0.ffn_down_exps.weight", 2).value_or(0));
    if (mlp == 0) mlp = size("feed_forward_length");
    vocab = dimension("token_embd.weight", 0).value_or(0);
    if (vocab == 0) missing_tensor("token_embd.weight");
    positions = size("context_length");
  }

  [[nodiscard]] std::string key(std::string_view name) const { return prefix_ + std::string(name); }
  [[nodiscard]] std::optional<int64_t> integer(std::string_view name) const { return meta_.integer(key(name)); }
  [[nodiscard]] std::optional<double> number(std::string_view name) const { return meta_.number(key(name)); }
  [[nodiscard]] const GgufFile& meta() const { return meta_; }
  [[nodiscard]] const GgufFiles& files() const { return files_; }
  [[nodiscard]] bool has(std::string_view tensor) const { return static_cast<bool>(files_.find(tensor)); }

  [[nodiscard]] int64_t size(std::string_view name) const {
    const int64_t value = meta_.required_integer(key(name));
    if (value < 1 || value > kLargestSize) meta_.fail_key(key(name), std::to_string(value), "a size from 1 to 2^31");
    return value;
  }

  [[nodiscard]] std::optional<int64_t> dimension(std::string_view tensor, size_t index) const {
    const LocatedTensor located = files_.find(tensor);
    if (!located || index >= located.tensor->shape.size()) return std::nullopt;
    return located.tensor->shape[index];
  }

  /// The sizes, tie_word_embeddings, dtype and special ids under the names of `spelling`.
  [[nodiscard]] Json common(const std::string& model_type, const std::string& architecture,
                            const Spelling& s = {}) const {
    Json config = {{"model_type", model_type}, {"architectures", {architecture}}};
    const auto put = [&](const char* name, const Json& value) {
      if (name) config[name] = value;
    };
    put(s.hidden, hidden);
    put(s.layers, layers);
    put(s.heads, heads);
    put(s.kv_heads, kv_heads);
    put(s.head_dim, head_dim);
    put(s.mlp, mlp);
    put(s.vocab, vocab);
    put(s.positions, positions);
    if (s.eps) config[s.eps] = epsilon();
    config["tie_word_embeddings"] = !has("output.weight");
    const LocatedTensor matrix = files_.find("blk.0.ffn_down.weight");
    const GgmlType type = matrix ? matrix.tensor->type : GgmlType::kF32;
    config["torch_dtype"] = type == GgmlType::kF16 ? "float16" : type == GgmlType::kBF16 ? "bfloat16" : "float32";
    for (const auto& [name, id] : {std::pair{"bos_token_id", "tokenizer.ggml.bos_token_id"},
                                   std::pair{"eos_token_id", "tokenizer.ggml.eos_token_id"},
                                   std::pair{"pad_token_id", "tokenizer.ggml.padding_token_id"}})
      if (const auto value = meta_.integer(id); value && *value >= 0 && *value < vocab) config[name] = *value;
    return config;
  }

  /// rope_theta and rope_scaling.
  void put_rotary(Json& config, const char* theta = "rope_theta") const {
    config[theta] = rotary_base();
    Json scaling = rotary_scaling(files_, {prefix_, rotary_base(), rotary_dims(), positions});
    if (!scaling.is_null()) config["rope_scaling"] = std::move(scaling);
  }

  [[nodiscard]] double rotary_base() const { return number("rope.freq_base").value_or(10000.0); }
  [[nodiscard]] int64_t rotary_dims() const {
    const int64_t dims = integer("rope.dimension_count").value_or(head_dim);
    if (dims < 2 || dims > head_dim || dims % 2 != 0)
      meta_.fail_key(key("rope.dimension_count"), std::to_string(dims),
                     "an even number up to " + std::to_string(head_dim));
    return dims;
  }
  /// The fraction that gives exactly rotary_dims() when multiplied by head_dim and cut to an integer.
  [[nodiscard]] double rotary_fraction() const {
    double fraction = static_cast<double>(rotary_dims()) / static_cast<double>(head_dim);
    while (static_cast<int64_t>(static_cast<double>(head_dim) * fraction) < rotary_dims())
      fraction = std::nextafter(fraction, 2.0);
    return fraction;
  }
  /// 0 if there is none.
  [[nodiscard]] int64_t window() const {
    const int64_t window = integer("attention.sliding_window").value_or(0);
    if (window < 0 || window > kLargestSize)
      meta_.fail_key(key("attention.sliding_window"), std::to_string(window), "a length in tokens");
    return window;
  }
  /// layer_types from the pattern key (a period, or one flag a layer). Without it, all layers but each `period`-th have
  /// the window; with period 0 all have it.
  [[nodiscard]] Json layer_types(int64_t period) const {
    const std::string name = key("attention.sliding_window_pattern");
    const GgufValue* value = meta_.find(name);
    std::vector<int64_t> flags;
    if (value && value->type == GgufValueType::kArray) {
      flags = meta_.integers(name);
      if (static_cast<int64_t>(flags.size()) < layers)
        meta_.fail_key(name, std::to_string(flags.size()) + " flags", std::to_string(layers) + ", one a layer");
    } else {
      if (const auto stored = integer("attention.sliding_window_pattern")) {
        period = *stored;
        if (period < 1) meta_.fail_key(name, std::to_string(period), "a positive period");
      }
      for (int64_t l = 0; l < layers; ++l) flags.push_back(period == 0 || l % period < period - 1);
    }
    Json types = Json::array();
    for (int64_t l = 0; l < layers; ++l)
      types.push_back(window() > 0 && flags[l] ? "sliding_attention" : "full_attention");
    return types;
  }

  int64_t hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, mlp = 0, vocab = 0, positions = 0;

 private:
  [[noreturn]] void missing_tensor(const std::string& name) const {
    throw Error(ErrorClass::kCorruption, {meta_.path().string(), "no tensor \"" + name + "\"", "a model with weights",
                                          "this may be a vocabulary or an adapter; name a model file"});
  }

  [[nodiscard]] double epsilon() const {
    for (const char* name : {"attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"})
      if (const auto value = number(name)) {
        if (*value <= 0 || *value > 1) meta_.fail_key(key(name), std::to_string(*value), "a small positive number");
        return *value;
      }
    meta_.fail_key(key("attention.layer_norm_rms_epsilon"), "missing", "a small positive number");
  }

  // One number, or a list with one number a layer, which must all be equal.
  [[nodiscard]] std::optional<int64_t> per_layer(std::string_view name) const {
    const GgufValue* value = meta_.find(key(name));
    if (!value || value->type != GgufValueType::kArray) return integer(name);
    const auto list = meta_.integers(key(name));
    if (list.empty()) meta_.fail_key(key(name), "an empty list", "one number a layer");
    if (std::any_of(list.begin(), list.end(), [&](int64_t n) { return n != list.front(); }))
      throw Error(ErrorClass::kUnsupported, {meta_.path().string() + ": key " + key(name), "layers of different sizes",
                                             "the same number in every layer", ""});
    return list.front();
  }

  void read_head_dim() {
    head_dim = integer("attention.key_length").value_or(0);
    if (head_dim == 0)
      if (const auto rows = dimension("blk.0.attn_q.weight", 0); rows && *rows % heads == 0) head_dim = *rows / heads;
    if (head_dim == 0)
      if (const auto rows = dimension("blk.0.attn_qkv.weight", 0); rows && *rows % (heads + 2 * kv_heads) == 0)
        head_dim = *rows / (heads + 2 * kv_heads);
    if (head_dim == 0) head_dim = hidden / heads;
    if (head_dim < 1 || head_dim > kLargestSize / heads)
      meta_.fail_key(key("attention.key_length"), std::to_string(head_dim), "a head size");
    if (integer("attention.value_length").value_or(head_dim) != head_dim)
      throw Error(ErrorClass::kUnsupported, {meta_.path().string() + ": key " + key("attention.value_length"),
                                             "values of another size than keys", std::to_string(head_dim), ""});
  }

  const GgufFiles& files_;
  const GgufFile& meta_;
  std::string prefix_;
};

Json llama(const Reader& r) {
  const int64_t experts = r.integer("expert_count").value_or(0);
  const bool qkv_bias = r.has("blk.0.attn_q.bias") || r.has("blk.0.attn_qkv.bias");
  const bool out_bias = r.has("blk.0.attn_output.bias");
  Json config;
  if (experts > 0) {
    config = r.common("mixtral", "MixtralForCausalLM");
    config["num_local_experts"] = experts;
    config["num_experts_per_tok"] = r.size("expert_used_count");
    config["sliding_window"] = nullptr;
  } else if (r.window() > 0) {
    config = r.common("mistral", "MistralForCausalLM");
    config["sliding_window"] = r.window();
  } else if (qkv_bias && !out_bias) {  // what Qwen2 computes; Llama's flag would want a bias on the output as well
    config = r.common("qwen2", "Qwen2ForCausalLM");
  } else {
    config = r.common("llama", "LlamaForCausalLM");
    config["attention_bias"] = qkv_bias;
    config["mlp_bias"] = r.has("blk.0.ffn_down.bias");
  }
  config["hidden_act"] = "silu";
  r.put_rotary(config);
  return config;
}

// llama.cpp's converter leaves windows out; emend writes them.
void put_qwen_windows(const Reader& r, Json& config) {
  config["use_sliding_window"] = r.window() > 0;
  if (r.window() == 0) return;
  config["sliding_window"] = r.window();
  config["layer_types"] = r.layer_types(0);
}

Json qwen2(const Reader& r) {
  Json config = r.common("qwen2", "Qwen2ForCausalLM");
  config["hidden_act"] = "silu";
  put_qwen_windows(r, config);
  r.put_rotary(config);
  return config;
}

Json qwen3(const Reader& r) {
  Json config = r.common("qwen3", "Qwen3ForCausalLM");
  config["hidden_act"] = "silu";
  config["attention_bias"] = r.has("blk.0.attn_q.bias");
  put_qwen_windows(r, config);
  r.put_rotary(config);
  return config;
}

Json qwen(const Reader& r) {
  Spelling s;
  s.kv_heads = nullptr;
  s.head_dim = "kv_channels";
  s.eps = "layer_norm_epsilon";
  Json config = r.common("qwen", "QWenLMHeadModel", s);
  config["intermediate_size"] = 2 * r.mlp;
  config["seq_length"] = r.positions;
  config["rotary_emb_base"] = r.rotary_base();
  config["rotary_pct"] = 1.0;
  config["no_bias"] = !r.has("blk.0.attn_output.bias");
  config["use_dynamic_ntk"] = config["use_logn_attn"] = false;  // llama.cpp does neither, and the file does not say
  return config;
}

Json gpt2(const Reader& r) {
  const Spelling s{"n_embd", "n_layer",           "n_head", nullptr, nullptr, "n_inner", "vocab_size",
                   nullptr,  "layer_norm_epsilon"};
  Json config = r.common("gpt2", "GPT2LMHeadModel", s);
  config["n_positions"] = r.dimension("position_embd.weight", 0).value_or(r.positions);
  config["activation_function"] = "gelu_new";
  return config;
}

Json gptj(const Reader& r) {
  const Spelling s{"n_embd",      "n_layer",           "n_head", nullptr, nullptr, "n_inner", "vocab_size",
                   "n_positions", "layer_norm_epsilon"};
  Json config = r.common("gptj", "GPTJForCausalLM", s);
  config["rotary_dim"] = r.rotary_dims();
  config["activation_function"] = "gelu_new";
  return config;
}

Json gptneox(const Reader& r) {
  Spelling s;
  s.kv_heads = s.head_dim = nullptr;
  s.eps = "layer_norm_eps";
  Json config = r.common("gpt_neox", "GPTNeoXForCausalLM", s);
  config["hidden_act"] = "gelu";
  config["attention_bias"] = r.has("blk.0.attn_qkv.bias");
  config["use_parallel_residual"] = r.meta().flag(r.key("use_parallel_residual")).value_or(true);
  config["rotary_pct"] = r.rotary_fraction();
  config["rotary_emb_base"] = r.rotary_base();
  return config;
}

Json phi2(const Reader& r) {
  Spelling s;
  s.head_dim = nullptr;
  s.eps = "layer_norm_eps";
  Json config = r.common("phi", "PhiForCausalLM", s);
  config["hidden_act"] = "gelu_new";
  config["partial_rotary_factor"] = r.rotary_fraction();
  config["qk_layernorm"] = false;
  r.put_rotary(config);
  return config;
}

Json phi3(const Reader& r) {
  Spelling s;
  s.head_dim = nullptr;
  Json config = r.common("phi3", "Phi3ForCausalLM", s);
  config["hidden_act"] = "silu";
  config["partial_rotary_factor"] = r.rotary_fraction();
  config["sliding_window"] = r.window() > 0 ? Json(r.window()) : Json();
  config["original_max_position_embeddings"] = r.integer("rope.scaling.original_context_length").value_or(r.positions);
  r.put_rotary(config);
  return config;
}

Json gemma(const Reader& r) {
  Json config = r.common("gemma", "GemmaForCausalLM");
  config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh";
  r.put_rotary(config);
  return config;
}

// Gemma 2 and 3: the scale of attention is not in the files. As llama.cpp has it, the 27B models use hidden / heads.
void put_gemma_attention(const Reader& r, int64_t layers_of_27b, Json& config) {
  const double scale = r.number("attention.scale").value_or(0);
  config["query_pre_attn_scalar"] = scale > 0                   ? Json(1.0 / (scale * scale))
                                    : r.layers == layers_of_27b ? Json(r.hidden / r.heads)
                                                                : Json(r.head_dim);
  config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh";
}

Json gemma2(const Reader& r) {
  Json config = r.common("gemma2", "Gemma2ForCausalLM");
  put_gemma_attention(r, 46, config);
  config["attn_logit_softcapping"] = r.number("attn_logit_softcapping").value_or(50.0);
  config["final_logit_softcapping"] = r.number("final_logit_softcapping").value_or(30.0);
  config["sliding_window"] = r.window() > 0 ? r.window() : 4096;
  if (r.window() > 0) config["layer_types"] = r.layer_types(2);
  r.put_rotary(config);
  return config;
}

Json gemma3(const Reader& r) {
  Json config = r.common("gemma3_text", "Gemma3ForCausalLM");
  put_gemma_attention(r, 62, config);
  config["attn_logit_softcapping"] = nullptr;
  const double cap = r.number("final_logit_softcapping").value_or(0);
  config["final_logit_softcapping"] = cap > 0 ? Json(cap) : Json();
  config["sliding_window"] = r.window() > 0 ? r.window() : r.positions;
  config["layer_types"] = r.layer_types(6);
  r.put_rotary(config);
  config["rope_local_base_freq"] = r.number("rope.freq_base_swa").value_or(10000.0);
  return config;
}

Json falcon(const Reader& r) {
  Spelling s;
  s.kv_heads = s.head_dim = nullptr;
  s.mlp = "ffn_hidden_size";
  s.eps = "layer_norm_epsilon";
  Json config = r.common("falcon", "FalconForCausalLM", s);
  const bool grouped = r.kv_heads > 1;
  config["num_kv_heads"] = r.kv_heads;
  config["new_decoder_architecture"] = grouped;
  config["multi_query"] = !grouped;
  config["num_ln_in_parallel_attn"] = grouped ? Json(r.has("blk.0.attn_norm_2.weight") ? 2 : 1) : Json();
  config["parallel_attn"] = true;
  config["alibi"] = false;
  config["bias"] = r.has("blk.0.attn_qkv.bias");
  config["activation"] = "gelu";
  r.put_rotary(config);
  return config;
}

Json chatglm(const Reader& r) {
  if (r.has("blk.0.attn_q.weight")) {  // converted from the split checkpoint of transformers
    Json config = r.common("glm", "GlmForCausalLM");
    config["hidden_act"] = "silu";
    config["attention_bias"] = r.has("blk.0.attn_q.bias");
    config["partial_rotary_factor"] = r.rotary_fraction();
    r.put_rotary(config);
    return config;
  }
  const Spelling s{"hidden_size",           "num_layers",  "num_attention_heads",
                   "multi_query_group_num", "kv_channels", "ffn_hidden_size",
                   "padded_vocab_size",     "seq_length",  "layernorm_epsilon"};
  Json config = r.common("chatglm", "ChatGLMModel", s);
  config["vocab_size"] = r.vocab;
  config["add_qkv_bias"] = r.has("blk.0.attn_qkv.bias");
  config["add_bias_linear"] = r.has("blk.0.ffn_down.bias");
  config["multi_query_attention"] = config["original_rope"] = config["rmsnorm"] = config["post_layer_norm"] = true;
  config["apply_residual_connection_post_layernorm"] = false;
  config["rope_ratio"] = r.rotary_base() / 10000.0;
  return config;
}

Json glm4(const Reader& r) {
  Json config = r.common("glm4", "Glm4ForCausalLM");
  config["hidden_act"] = "silu";
  config["attention_bias"] = r.has("blk.0.attn_q.bias");
  config["partial_rotary_factor"] = r.rotary_fraction();
  r.put_rotary(config);
  return config;
}

Json baichuan(const Reader& r) {
  Spelling s;
  s.kv_heads = s.head_dim = nullptr;
  const bool alibi = r.layers == 40;  // the 13B models, as llama.cpp tells them apart
  const bool second = r.vocab == 125696;
  if (alibi) s.positions = "model_max_length";
  Json config = r.common("baichuan", alibi || second ? "BaichuanForCausalLM" : "BaiChuanForCausalLM", s);
  config["hidden_act"] = "silu";
  return config;
}

Json internlm2(const Reader& r) {
  Spelling s;
  s.head_dim = nullptr;
  Json config = r.common("internlm2", "InternLM2ForCausalLM", s);
  config["hidden_act"] = "silu";
  config["bias"] = false;
  r.put_rotary(config);
  return config;
}

using Synthesis = Json (*)(const Reader&);
const std::map<std::string, Synthesis> kSyntheses = {
    {"llama", llama},       {"qwen2", qwen2},        {"qwen3", qwen3},   {"qwen", qwen},       {"gpt2", gpt2},
    {"gptj", gptj},         {"gptneox", gptneox},    {"phi2", phi2},     {"phi3", phi3},       {"gemma", gemma},
    {"gemma2", gemma2},     {"gemma3", gemma3},      {"falcon", falcon}, {"chatglm", chatglm}, {"glm4", glm4},
    {"baichuan", baichuan}, {"internlm2", internlm2}};

// The original config.json, if emend wrote the file.
Json kept_config(const GgufFile& meta, const GgufArchitecture& architecture) {
  const auto text = meta.text(kConfigKey);
  if (!text) return {};
  const Json config = parse_json_text(*text, meta.path().string() + ": key " + std::string(kConfigKey));
  const auto type = config.is_object() ? config.find("model_type") : config.end();
  const auto& known = architecture.model_types;
  if (!config.is_object() || type == config.end() || !type->is_string() ||
      std::find(known.begin(), known.end(), type->get<std::string>()) == known.end())
    meta.fail_key(kConfigKey, "text that is not a config.json of architecture " + architecture.name,
                  "what emend wrote there, or no such key");
  const int64_t blocks = meta.required_integer(architecture.name + ".block_count");
  for (const char* layers : {"num_hidden_layers", "n_layer", "num_layers"})
    if (const auto it = config.find(layers); it != config.end() && *it != blocks)
      meta.fail_key(kConfigKey, std::string(layers) + " " + it->dump().substr(0, 40),
                    std::to_string(blocks) + " as in block_count");
  return config;
}

}  // namespace

Json config_from_gguf(const GgufFiles& files, const GgufArchitecture& architecture) {
  if (Json kept = kept_config(files.metadata(), architecture); !kept.is_null()) return kept;
  return kSyntheses.at(architecture.name)(Reader(files, architecture));
}

}  // namespace emend::models::detail
