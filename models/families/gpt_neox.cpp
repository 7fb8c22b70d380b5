// GPT-NeoX and Pythia: one matrix for q, k, v with a head's three parts together, partial rotary, parallel residual
// under two LayerNorms (or a sequential one).
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec gpt_neox_family() {
  using families::append, families::linear, families::norm;
  FamilySpec spec = families::named("gpt_neox", "gpt_neox.");
  spec.keys.kv_heads = {};
  spec.keys.norm_eps = {"layer_norm_eps"};
  spec.keys.default_norm_eps = 1e-5;
  spec.keys.default_activation = "gelu";
  spec.keys.rotary_fraction = 0.25;
  spec.keys.rotary_fraction_keys = {"rotary_pct", "partial_rotary_factor"};
  spec.keys.theta = {"rotary_emb_base", "rope_theta"};
  spec.block.norm = Norm::kLayer;
  spec.block.qkv = Qkv::kPerHead;
  spec.block.mlp = Mlp::kPlain;
  spec.block.mlp_bias = true;
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    config.residual = reader.flag_or({"use_parallel_residual"}, true) ? Residual::kParallel : Residual::kSequential;
    config.qkv_bias = config.out_bias = reader.flag_or({"attention_bias"}, true);
  };
  const std::string layer = "gpt_neox.layers.{layer}.";
  spec.tensors = {{Part::kEmbedding, "gpt_neox.embed_in.weight", "V D"}};
  append(spec.tensors, norm(Part::kAttnNorm, layer + "input_layernorm", true));
  append(spec.tensors, linear(Part::kQkv, layer + "attention.query_key_value", "3Q D", &ModelConfig::qkv_bias));
  append(spec.tensors, linear(Part::kAttnOut, layer + "attention.dense", "D Q", &ModelConfig::out_bias));
  append(spec.tensors, norm(Part::kMlpNorm, layer + "post_attention_layernorm", true));
  append(spec.tensors, linear(Part::kUp, layer + "mlp.dense_h_to_4h", "F D", true));
  append(spec.tensors, linear(Part::kDown, layer + "mlp.dense_4h_to_h", "D F", true));
  append(spec.tensors, norm(Part::kFinalNorm, "gpt_neox.final_layer_norm", true));
  spec.tensors.push_back({Part::kHead, "embed_out.weight", "V D"});
  spec.ignored = {layer + "attention.bias", layer + "attention.masked_bias", layer + "attention.rotary_emb.inv_freq",
                  layer + "attention.norm_factor"};
  spec.modules = families::modules_of(spec.tensors);
  spec.gguf = families::plain_gguf("gptneox", "GPTNeoXForCausalLM");
  spec.gguf.not_in_config = {"head_dim"};
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) {
    config["attention_bias"] = r.has("blk.0.attn_qkv.bias");
    config["use_parallel_residual"] = r.flag("use_parallel_residual").value_or(true);
    config["rotary_pct"] = r.rotary_fraction();
  };
  spec.gguf.write = [](const ModelConfig& c, GgufConfig& out) {
    out.metadata.set_flag(out.prefix + "use_parallel_residual", c.residual == Residual::kParallel);
  };
  spec.debug = {families::tiny(spec, "parallel", R"({"num_attention_heads": 2, "intermediate_size": 64})"),
                families::tiny(spec, "sequential", R"({"hidden_size": 24, "num_hidden_layers": 2,
                      "num_attention_heads": 3, "intermediate_size": 72, "vocab_size": 90, "rotary_pct": 0.5,
                      "hidden_act": "gelu_fast", "use_parallel_residual": false})")};
  return spec;
}

}  // namespace emend::models
