// GLM in the transformers layout (glm-4-9b-chat-hf, glm-edge): separate q, k, v with biases, fused gate_up_proj,
// interleaved rotary on the first half of each head.
#include <emend/models/families/common.h>
#include <emend/models/tokenizer/detail/sources.h>

namespace emend::models {

FamilySpec glm_family() {
  FamilySpec spec = families::glm_relative("glm");
  spec.gguf.architecture = "chatglm";
  spec.gguf.class_name = "GlmForCausalLM";
  spec.gguf.claims = [](const GgufConfigReader& r) { return r.has("blk.0.attn_q.weight"); };  // queries apart
  spec.gguf.pre = {{"chatglm-bpe", detail::split_pre_tokenizer(detail::kLlama3Pattern)}};
  spec.debug = {families::tiny(spec, "plain", R"({"num_key_value_heads": 2, "head_dim": 8, "attention_bias": true})")};
  return spec;
}

}  // namespace emend::models
