// Llama 1, 2, 3.x, SmolLM2 and the many models published as "llama".
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec llama_family() {
  FamilySpec spec;
  spec.name = "llama";
  spec.model_types = {"llama"};
  spec.base_prefix = "model.";
  spec.tensors = families::llama_tensors();
  spec.ignored = {"*.rotary_emb.inv_freq"};
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    config.qkv_bias = config.out_bias = reader.flag_or({"attention_bias"}, false);
    config.mlp_bias = reader.flag_or({"mlp_bias"}, false);
  };
  spec.debug = {
      {"plain", R"({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "intermediate_size": 56, "vocab_size": 101, "max_position_embeddings": 64})"},
      {"llama3", R"({"model_type": "llama", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
                     "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 40, "vocab_size": 90,
                     "max_position_embeddings": 64, "attention_bias": true, "mlp_bias": true, "tie_word_embeddings": true,
                     "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}})"},
  };
  return spec;
}

}  // namespace emend::models
