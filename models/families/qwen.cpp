// Qwen v1: fused c_attn with a bias, silu on w2 (w1 is the linear part), rotary positions that are columns, frequencies
// that depend on the prompt's length (dynamic NTK) and queries scaled by log-n past the trained length.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec qwen_family() {
  using families::append, families::linear, families::norm;
  FamilySpec spec = families::named("qwen", "transformer.");
  spec.keys.head_dim = {"kv_channels"};
  spec.keys.kv_heads = {};
  spec.keys.max_positions = {"max_position_embeddings", "seq_length"};
  spec.keys.norm_eps = {"layer_norm_epsilon"};
  spec.keys.activation = {};
  spec.keys.rotary_fraction_keys = {"rotary_pct"};
  spec.keys.theta = {"rotary_emb_base"};
  spec.block.qkv = Qkv::kBlocks;
  spec.block.qkv_bias = true;
  spec.block.position_rule = PositionRule::kColumns;
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    if (config.mlp_width % 2 != 0) reader.fail("intermediate_size", std::to_string(config.mlp_width), "an even number");
    config.mlp_width /= 2;  // the file counts both halves
    config.out_bias = config.mlp_bias = !reader.flag_or({"no_bias"}, true);
    const int64_t trained = reader.integer({"seq_length"});
    if (reader.flag_or({"use_dynamic_ntk"}, true)) {
      config.rotaries.front().kind = Rotary::Kind::kQwenNtk;
      config.rotaries.front().original_max = trained;
    }
    if (reader.flag_or({"use_logn_attn"}, true)) config.logn_length = trained;
  };
  const std::string layer = "transformer.h.{layer}.";
  spec.tensors = {{Part::kEmbedding, "transformer.wte.weight", "V D"}};
  append(spec.tensors, norm(Part::kAttnNorm, layer + "ln_1", false));
  append(spec.tensors, linear(Part::kQkv, layer + "attn.c_attn", "3Q D", &ModelConfig::qkv_bias));
  append(spec.tensors, linear(Part::kAttnOut, layer + "attn.c_proj", "D Q", &ModelConfig::out_bias));
  append(spec.tensors, norm(Part::kMlpNorm, layer + "ln_2", false));
  append(spec.tensors, linear(Part::kUp, layer + "mlp.w1", "F D", &ModelConfig::mlp_bias));
  append(spec.tensors, linear(Part::kGate, layer + "mlp.w2", "F D", &ModelConfig::mlp_bias));
  append(spec.tensors, linear(Part::kDown, layer + "mlp.c_proj", "D F", &ModelConfig::mlp_bias));
  append(spec.tensors, norm(Part::kFinalNorm, "transformer.ln_f", false));
  spec.tensors.push_back({Part::kHead, "lm_head.weight", "V D"});
  spec.ignored = {"transformer.rotary_emb.inv_freq", layer + "attn.rotary_emb.inv_freq", layer + "attn.masked_bias"};
  spec.modules = families::modules_of(spec.tensors);
  spec.gguf = families::plain_gguf("qwen", "QWenLMHeadModel");
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) {
    config["intermediate_size"] = 2 * r.mlp;
    config["seq_length"] = r.positions;
    config["rotary_pct"] = 1.0;
    config["no_bias"] = !r.has("blk.0.attn_output.bias");
    config["use_dynamic_ntk"] = config["use_logn_attn"] = false;  // llama.cpp does neither, and the file does not say
  };
  spec.gguf.write = [](const ModelConfig& c, GgufConfig& out) { out.integer("feed_forward_length", 2 * c.mlp_width); };
  spec.debug = {families::tiny(spec, "plain", R"({"intermediate_size": 96, "kv_channels": 8, "seq_length": 64,
                      "max_position_embeddings": null})"),
                families::tiny(spec, "ntk", R"({"hidden_size": 24, "intermediate_size": 64, "num_hidden_layers": 2,
                      "num_attention_heads": 3, "kv_channels": 8, "vocab_size": 90, "seq_length": 8})")};
  return spec;
}

}  // namespace emend::models
