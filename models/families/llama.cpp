// Llama 1, 2, 3.x, SmolLM2 and the many models published as "llama".
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec llama_family() {
  FamilySpec spec = families::llama_relative("llama");
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    config.qkv_bias = config.out_bias = reader.flag_or({"attention_bias"}, false);
    config.mlp_bias = reader.flag_or({"mlp_bias"}, false);
  };
  spec.gguf = families::llama_gguf("LlamaForCausalLM");
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) {
    const bool qkv_bias = r.has("blk.0.attn_q.bias") || r.has("blk.0.attn_qkv.bias");
    if (qkv_bias && !r.has("blk.0.attn_output.bias")) {
      // What Qwen2 computes; Llama's flag would want a bias on the output as well.
      config["model_type"] = "qwen2";
      config["architectures"] = {"Qwen2ForCausalLM"};
    } else {
      config["attention_bias"] = qkv_bias;
      config["mlp_bias"] = r.has("blk.0.ffn_down.bias");
    }
  };
  spec.debug = {families::tiny(spec, "plain", R"({"num_key_value_heads": 2})"),
                families::tiny(spec, "llama3", R"({"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
                      "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 40, "vocab_size": 90,
                      "attention_bias": true, "mlp_bias": true, "tie_word_embeddings": true,
                      "rope_scaling": {"rope_type": "llama3", "factor": 4.0,
                      "original_max_position_embeddings": 16}})")};
  return spec;
}

}  // namespace emend::models
