// Phi-1, Phi-1.5 and Phi-2: parallel residual under one LayerNorm, biases everywhere, also on the head.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec phi_family() {
  using families::append, families::linear, families::norm;
  FamilySpec spec = families::llama_relative("phi");
  spec.keys.norm_eps = {"layer_norm_eps"};
  spec.keys.default_norm_eps = 1e-5;
  spec.keys.default_activation = "gelu_new";
  spec.keys.rotary_fraction = 0.5;
  spec.block.norm = Norm::kLayer;
  spec.block.residual = Residual::kParallel;
  spec.block.mlp_norm = false;
  spec.block.mlp = Mlp::kPlain;
  spec.block.qkv_bias = spec.block.out_bias = spec.block.mlp_bias = spec.block.head_bias = true;
  spec.refine = [](const ConfigReader& reader, ModelConfig&) {
    if (reader.flag_or({"qk_layernorm"}, false))
      reader.unsupported("qk_layernorm", "true", "false, as in the published models", "this variant is not known");
  };
  const std::string layer = "model.layers.{layer}.";
  spec.tensors = {{Part::kEmbedding, "model.embed_tokens.weight", "V D"}};
  append(spec.tensors, norm(Part::kAttnNorm, layer + "input_layernorm", true));
  append(spec.tensors, families::attention(layer + "self_attn.", "dense", true, true));
  append(spec.tensors, linear(Part::kUp, layer + "mlp.fc1", "F D", true));
  append(spec.tensors, linear(Part::kDown, layer + "mlp.fc2", "D F", true));
  append(spec.tensors, norm(Part::kFinalNorm, "model.final_layernorm", true));
  append(spec.tensors, linear(Part::kHead, "lm_head", "V D", true));
  spec.modules = families::modules_of(spec.tensors);
  spec.gguf = families::plain_gguf("phi2", "PhiForCausalLM");
  spec.gguf.not_in_config = {"head_dim"};
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) {
    config["partial_rotary_factor"] = r.rotary_fraction();
    config["qk_layernorm"] = false;
  };
  spec.debug = {families::tiny(spec, "plain")};
  return spec;
}

}  // namespace emend::models
