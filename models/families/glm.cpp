// GLM in the transformers layout (glm-4-9b-chat-hf, glm-edge): separate q, k, v with biases, fused gate_up_proj,
// interleaved rotary on the first half of each head.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec glm_family() {
  FamilySpec spec;
  spec.name = "glm";
  spec.model_types = {"glm"};
  spec.base_prefix = "model.";
  spec.keys.default_norm_eps = 1.5625e-07;
  spec.keys.default_head_dim = 128;
  spec.keys.rotary_fraction = 0.5;
  spec.block.mlp = Mlp::kGatedFused;
  spec.tensors = families::glm_tensors();
  spec.ignored = {"*.rotary_emb.inv_freq"};
  spec.refine = families::refine_glm;
  spec.debug = {{"plain", R"({"model_type": "glm", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                              "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 56, "vocab_size": 101,
                              "attention_bias": true, "max_position_embeddings": 64})"}};
  return spec;
}

}  // namespace emend::models
