// ChatGLM2, ChatGLM3 and GLM-4-9b-chat in their own (remote code) layout: fused multi-query qkv, interleaved rotary on
// the first half of each head, fused gate and up rows.
#include <emend/models/families/common.h>
#include <emend/models/tokenizer/detail/sources.h>

namespace emend::models {

static void refine_chatglm(const ConfigReader& reader, ModelConfig& config) {
  const bool multi_query = reader.flag_or({"multi_query_attention"}, false);
  config.qkv = multi_query ? Qkv::kBlocks : Qkv::kPerHead;
  config.n_kv_heads = multi_query ? reader.integer_or({"multi_query_group_num"}, 1) : config.n_heads;
  const bool linear_bias = reader.flag_or({"add_bias_linear"}, true);
  config.qkv_bias = linear_bias || reader.flag_or({"add_qkv_bias"}, false);
  config.out_bias = config.mlp_bias = linear_bias;
  config.final_norm = reader.flag_or({"post_layer_norm"}, true);
  if (!reader.flag_or({"rmsnorm"}, true))
    reader.unsupported("rmsnorm", "false", "true, as in the published models", "the LayerNorm variant is not known");
  if (reader.flag_or({"apply_residual_connection_post_layernorm"}, false))
    reader.unsupported("apply_residual_connection_post_layernorm", "true", "false, as in the published models",
                       "this residual form is not known");
  Rotary& rotary = config.rotaries.front();
  rotary.interleaved = true;
  rotary.theta = 10000 * reader.number_or({"rope_ratio"}, 1);
}

static void read_chatglm_gguf(const GgufConfigReader& r, nlohmann::json& config) {
  config["vocab_size"] = r.vocab;
  config["multi_query_group_num"] = r.kv_heads;
  config["add_qkv_bias"] = r.has("blk.0.attn_qkv.bias");
  config["add_bias_linear"] = r.has("blk.0.ffn_down.bias");
  config["multi_query_attention"] = config["original_rope"] = config["rmsnorm"] = config["post_layer_norm"] = true;
  config["apply_residual_connection_post_layernorm"] = false;
  r.put_rotary(config);
  for (const char* other : {"rope_theta", "partial_rotary_factor"}) config.erase(other);
  config["rope_ratio"] = r.rotary_base() / 10000.0;
}

FamilySpec chatglm_family() {
  using families::append, families::linear, families::norm;
  FamilySpec spec = families::named("chatglm", "transformer.");
  spec.keys.layers = {"num_layers", "num_hidden_layers"};
  spec.keys.kv_heads = {};  // decided with multi_query_attention
  spec.keys.head_dim = {"kv_channels"};
  spec.keys.mlp_width = {"ffn_hidden_size"};
  spec.keys.vocab = {"padded_vocab_size", "vocab_size"};
  spec.keys.max_positions = {"seq_length", "max_position_embeddings"};
  spec.keys.norm_eps = {"layernorm_epsilon"};
  spec.keys.default_norm_eps = 1e-5;
  spec.keys.activation = {};
  spec.keys.rotary_fraction = 0.5;
  spec.block.mlp = Mlp::kGatedFused;
  spec.refine = refine_chatglm;
  const std::string layer = "transformer.encoder.layers.{layer}.";
  spec.tensors = {{Part::kEmbedding, "transformer.embedding.word_embeddings.weight", "V D"}};
  append(spec.tensors, norm(Part::kAttnNorm, layer + "input_layernorm", false));
  append(spec.tensors, linear(Part::kQkv, layer + "self_attention.query_key_value", "Q+2K D", &ModelConfig::qkv_bias));
  append(spec.tensors, linear(Part::kAttnOut, layer + "self_attention.dense", "D Q", &ModelConfig::out_bias));
  append(spec.tensors, norm(Part::kMlpNorm, layer + "post_attention_layernorm", false));
  append(spec.tensors, linear(Part::kGateUp, layer + "mlp.dense_h_to_4h", "2F D", &ModelConfig::mlp_bias));
  append(spec.tensors, linear(Part::kDown, layer + "mlp.dense_4h_to_h", "D F", &ModelConfig::mlp_bias));
  append(spec.tensors, norm(Part::kFinalNorm, "transformer.encoder.final_layernorm", false, &ModelConfig::final_norm));
  spec.tensors.push_back({Part::kHead, "transformer.output_layer.weight", "V D"});
  spec.ignored = {"transformer.rotary_pos_emb.inv_freq"};
  spec.modules = families::modules_of(spec.tensors);
  spec.gguf = families::plain_gguf("chatglm", "ChatGLMModel");
  spec.gguf.read = read_chatglm_gguf;
  spec.gguf.own_rotary = true;
  spec.gguf.pre = {{"chatglm-bpe", detail::split_pre_tokenizer(detail::kLlama3Pattern)}};
  spec.debug = {families::tiny(spec, "plain", R"({"kv_channels": 8, "add_qkv_bias": true, "add_bias_linear": false,
                      "multi_query_attention": true, "multi_query_group_num": 2, "rope_ratio": 500,
                      "layernorm_epsilon": 1.5625e-07})")};
  return spec;
}

}  // namespace emend::models
