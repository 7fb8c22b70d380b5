// Qwen3 (dense): an RMS norm on every query and key head, a head size of its own, no biases.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec qwen3_family() {
  FamilySpec spec = families::llama_relative("qwen3");
  spec.keys.default_head_dim = 128;
  spec.block.qk_norm = true;
  families::append(spec.tensors, families::head_norms("model.layers.{layer}.self_attn."));
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    config.qkv_bias = config.out_bias = reader.flag_or({"attention_bias"}, false);
    families::read_qwen_windows(reader, config);
  };
  spec.gguf = families::plain_gguf("qwen3", "Qwen3ForCausalLM");
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) {
    config["attention_bias"] = r.has("blk.0.attn_q.bias");
    families::read_qwen_gguf_windows(r, config);
  };
  spec.debug = {families::tiny(spec, "yarn", R"({"num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1000000.0,
                      "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}})")};
  return spec;
}

}  // namespace emend::models
