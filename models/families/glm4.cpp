// GLM-4-0414 and GLM-Z1: GLM with further norms after attention and MLP. post_attention_layernorm is the norm before
// the MLP here; in Gemma 2 and 3 the same name is the norm after attention.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec glm4_family() {
  FamilySpec spec;
  spec.name = "glm4";
  spec.model_types = {"glm4"};
  spec.base_prefix = "model.";
  spec.keys.default_norm_eps = 1.5625e-07;
  spec.keys.default_head_dim = 128;
  spec.keys.rotary_fraction = 0.5;
  spec.block.mlp = Mlp::kGatedFused;
  spec.block.norm_order = NormOrder::kSandwich;
  spec.tensors = families::glm_tensors();
  const std::string layer = "model.layers.{layer}.";
  families::append(spec.tensors, families::norm(Part::kAttnPostNorm, layer + "post_self_attn_layernorm", false));
  families::append(spec.tensors, families::norm(Part::kMlpPostNorm, layer + "post_mlp_layernorm", false));
  spec.ignored = {"*.rotary_emb.inv_freq"};
  spec.refine = families::refine_glm;
  spec.debug = {{"plain", R"({"model_type": "glm4", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                              "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 56, "vocab_size": 101,
                              "attention_bias": true, "max_position_embeddings": 64})"}};
  return spec;
}

}  // namespace emend::models
