// Falcon 7B (multi-query, one norm), 40B and 180B (groups, two norms), Falcon-RW (ALiBi, sequential, biases).
#include <emend/models/families/common.h>

namespace emend::models {

static void refine_falcon(const ConfigReader& reader, ModelConfig& config) {
  const bool grouped = reader.flag_or({"new_decoder_architecture"}, false);
  const bool multi_query = reader.flag_or({"multi_query"}, true);
  const bool parallel = grouped || reader.flag_or({"parallel_attn"}, true);
  if (grouped) {
    config.qkv = Qkv::kPerGroup;
    config.n_kv_heads = reader.integer_or({"num_kv_heads", "n_head_kv"}, config.n_heads);
  } else {
    config.qkv = multi_query ? Qkv::kBlocks : Qkv::kPerHead;
    config.n_kv_heads = multi_query ? 1 : config.n_heads;
  }
  config.residual = parallel ? Residual::kParallel : Residual::kSequential;
  const int64_t norms = reader.integer_or({"num_ln_in_parallel_attn"}, grouped ? 2 : 1);
  config.mlp_norm = !parallel || norms == 2;
  config.qkv_bias = config.out_bias = config.mlp_bias = reader.flag_or({"bias"}, false);
  if (reader.flag_or({"alibi"}, false)) {
    config.positions = Positions::kAlibi;
    config.alibi_like_falcon = true;
  }
}

static bool has_two_norms(const ModelConfig& config) {
  return config.residual == Residual::kParallel && config.mlp_norm;
}

static void read_falcon_gguf(const GgufConfigReader& r, nlohmann::json& config) {
  const bool grouped = r.kv_heads > 1;
  config["num_kv_heads"] = r.kv_heads;
  config["new_decoder_architecture"] = grouped;
  config["multi_query"] = !grouped;
  config["num_ln_in_parallel_attn"] = nullptr;
  if (grouped) config["num_ln_in_parallel_attn"] = r.has("blk.0.attn_norm_2.weight") ? 2 : 1;
  config["parallel_attn"] = true;
  config["alibi"] = false;
  config["bias"] = r.has("blk.0.attn_qkv.bias");
}

static GgufForm falcon_gguf() {
  GgufForm form = families::plain_gguf("falcon", "FalconForCausalLM");
  form.wide_head = true;
  form.not_in_config = {"head_dim"};
  form.tensor_name = [](const ModelConfig& c, Part part) {  // the second norm came later: the MLP's kept the old name
    if (!has_two_norms(c)) return "";
    return part == Part::kAttnNorm ? "attn_norm_2" : part == Part::kMlpNorm ? "attn_norm" : "";
  };
  form.read = read_falcon_gguf;
  form.write = [](const ModelConfig& c, GgufConfig& out) {
    out.text("tensor_data_layout", "jploski");
    if (c.residual != Residual::kParallel || c.positions != Positions::kRotary)
      out.note("llama.cpp cannot run this model: it knows Falcon only with parallel blocks and rotary positions");
  };
  return form;
}

FamilySpec falcon_family() {
  using families::append, families::linear, families::norm;
  FamilySpec spec = families::named("falcon", "transformer.");
  spec.model_types = {"falcon", "RefinedWebModel", "RefinedWeb"};
  spec.keys.layers = {"num_hidden_layers", "n_layer"};
  spec.keys.heads = {"num_attention_heads", "n_head"};
  spec.keys.kv_heads = {};  // decided with the variant
  spec.keys.mlp_width = {"ffn_hidden_size"};
  spec.keys.mlp_width_factor = 4;
  spec.keys.default_max_positions = 2048;
  spec.keys.norm_eps = {"layer_norm_epsilon"};
  spec.keys.default_norm_eps = 1e-5;
  spec.keys.activation = {"activation"};
  spec.keys.default_activation = "gelu";
  spec.keys.default_tied = true;
  spec.block.norm = Norm::kLayer;
  spec.block.mlp = Mlp::kPlain;
  spec.refine = refine_falcon;
  const auto not_two_norms = [](const ModelConfig& c) { return !has_two_norms(c); };
  const auto sequential = [](const ModelConfig& c) { return c.residual == Residual::kSequential; };
  const std::string layer = "transformer.h.{layer}.";
  spec.tensors = {{Part::kEmbedding, "transformer.word_embeddings.weight", "V D"}};
  append(spec.tensors, norm(Part::kAttnNorm, layer + "input_layernorm", true, not_two_norms));
  append(spec.tensors, norm(Part::kAttnNorm, layer + "ln_attn", true, has_two_norms));
  append(spec.tensors, linear(Part::kQkv, layer + "self_attention.query_key_value", "Q+2K D", &ModelConfig::qkv_bias));
  append(spec.tensors, linear(Part::kAttnOut, layer + "self_attention.dense", "D Q", &ModelConfig::out_bias));
  append(spec.tensors, norm(Part::kMlpNorm, layer + "post_attention_layernorm", true, sequential));
  append(spec.tensors, norm(Part::kMlpNorm, layer + "ln_mlp", true, has_two_norms));
  append(spec.tensors, linear(Part::kUp, layer + "mlp.dense_h_to_4h", "F D", &ModelConfig::mlp_bias));
  append(spec.tensors, linear(Part::kDown, layer + "mlp.dense_4h_to_h", "D F", &ModelConfig::mlp_bias));
  append(spec.tensors, norm(Part::kFinalNorm, "transformer.ln_f", true));
  spec.tensors.push_back({Part::kHead, "lm_head.weight", "V D"});
  spec.ignored = {"*.rotary_emb.inv_freq"};
  spec.modules = families::modules_of(spec.tensors);
  spec.gguf = falcon_gguf();
  const std::string sizes = R"("model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 101)";
  spec.debug = {
      {"multi_query", "{" + sizes + R"(, "num_attention_heads": 4})"},
      {"grouped", "{" + sizes + R"(, "num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": true})"},
      {"rw", "{" + sizes + R"(, "num_attention_heads": 4, "multi_query": false, "parallel_attn": false,
                                         "alibi": true, "bias": true})"}};
  return spec;
}

}  // namespace emend::models
