// GLM-4-0414 and GLM-Z1: GLM with further norms after attention and MLP. post_attention_layernorm is the norm before
// the MLP here; in Gemma 2 and 3 the same name is the norm after attention.
#include <emend/models/families/common.h>
#include <emend/models/tokenizer/detail/sources.h>

namespace emend::models {

FamilySpec glm4_family() {
  FamilySpec spec = families::glm_relative("glm4");
  spec.block.norm_order = NormOrder::kSandwich;
  const std::string layer = "model.layers.{layer}.";
  families::append(spec.tensors, families::norm(Part::kAttnPostNorm, layer + "post_self_attn_layernorm", false));
  families::append(spec.tensors, families::norm(Part::kMlpPostNorm, layer + "post_mlp_layernorm", false));
  spec.gguf.architecture = "glm4";
  spec.gguf.class_name = "Glm4ForCausalLM";
  spec.gguf.pre = {{"glm4", detail::split_pre_tokenizer(detail::kLlama3Pattern)}};
  spec.debug = {families::tiny(spec, "plain", R"({"num_key_value_heads": 2, "head_dim": 8, "attention_bias": true})")};
  return spec;
}

}  // namespace emend::models
