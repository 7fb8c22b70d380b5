// GPT-J: parallel residual under one LayerNorm, interleaved rotary on rotary_dim dimensions, a head with a bias.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec gptj_family() {
  using families::append, families::linear, families::norm;
  FamilySpec spec = families::named("gptj", "transformer.");
  spec.keys.hidden = {"n_embd"};
  spec.keys.layers = {"n_layer"};
  spec.keys.heads = {"n_head"};
  spec.keys.kv_heads = {};
  spec.keys.mlp_width = {"n_inner"};
  spec.keys.mlp_width_factor = 4;
  spec.keys.max_positions = {"n_positions", "n_ctx"};
  spec.keys.norm_eps = {"layer_norm_epsilon"};
  spec.keys.default_norm_eps = 1e-5;
  spec.keys.activation = {"activation_function"};
  spec.keys.default_activation = "gelu_new";
  spec.block.norm = Norm::kLayer;
  spec.block.residual = Residual::kParallel;
  spec.block.mlp_norm = false;
  spec.block.mlp = Mlp::kPlain;
  spec.block.mlp_bias = spec.block.head_bias = true;
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    config.rotaries.front().interleaved = true;
    config.rotaries.front().dims =
        reader.is_null("rotary_dim") ? config.head_dim : reader.integer_or({"rotary_dim"}, 64);
  };
  const std::string layer = "transformer.h.{layer}.";
  spec.tensors = {{Part::kEmbedding, "transformer.wte.weight", "V D"}};
  append(spec.tensors, norm(Part::kAttnNorm, layer + "ln_1", true));
  append(spec.tensors, families::attention(layer + "attn.", "out_proj", false, false));
  append(spec.tensors, linear(Part::kUp, layer + "mlp.fc_in", "F D", true));
  append(spec.tensors, linear(Part::kDown, layer + "mlp.fc_out", "D F", true));
  append(spec.tensors, norm(Part::kFinalNorm, "transformer.ln_f", true));
  append(spec.tensors, linear(Part::kHead, "lm_head", "V D", true));
  spec.ignored = {layer + "attn.bias", layer + "attn.masked_bias", layer + "attn.embed_positions"};
  spec.modules = families::modules_of(spec.tensors);
  spec.gguf = families::plain_gguf("gptj", "GPTJForCausalLM");
  spec.gguf.not_run_by_llama_cpp = true;
  spec.gguf.not_in_config = {"head_dim"};
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) { config["rotary_dim"] = r.rotary_dims(); };
  spec.gguf.own_rotary = true;
  spec.debug = {families::tiny(spec, "plain", R"({"rotary_dim": 4})")};
  return spec;
}

}  // namespace emend::models
