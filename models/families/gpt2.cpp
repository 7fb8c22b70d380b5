// GPT-2: Conv1D weights [in, out], learned positions that are columns, head tied to the embedding.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec gpt2_family() {
  using families::append, families::linear, families::norm;
  FamilySpec spec = families::named("gpt2", "transformer.");
  spec.keys.hidden = {"n_embd", "hidden_size"};
  spec.keys.layers = {"n_layer", "num_hidden_layers"};
  spec.keys.heads = {"n_head", "num_attention_heads"};
  spec.keys.mlp_width = {"n_inner"};
  spec.keys.mlp_width_factor = 4;
  spec.keys.max_positions = {"n_positions", "n_ctx", "max_position_embeddings"};
  spec.keys.norm_eps = {"layer_norm_epsilon"};
  spec.keys.default_norm_eps = 1e-5;
  spec.keys.activation = {"activation_function"};
  spec.keys.default_activation = "gelu_new";
  spec.keys.default_tied = true;
  spec.block.norm = Norm::kLayer;
  spec.block.positions = Positions::kLearned;
  spec.block.qkv = Qkv::kBlocks;
  spec.block.mlp = Mlp::kPlain;
  spec.block.qkv_bias = spec.block.out_bias = spec.block.mlp_bias = true;
  spec.orientation = Orientation::kInOut;
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    if (!reader.flag_or({"scale_attn_weights"}, true)) config.attention_scale = 1;
    config.scale_by_inverse_layer = reader.flag_or({"scale_attn_by_inverse_layer_idx"}, false);
  };
  const std::string layer = "transformer.h.{layer}.";
  spec.tensors = {{Part::kEmbedding, "transformer.wte.weight", "V D"},
                  {Part::kPositions, "transformer.wpe.weight", "P D"}};
  append(spec.tensors, norm(Part::kAttnNorm, layer + "ln_1", true));
  append(spec.tensors, linear(Part::kQkv, layer + "attn.c_attn", "D 3D", true, true));
  append(spec.tensors, linear(Part::kAttnOut, layer + "attn.c_proj", "D D", true, true));
  append(spec.tensors, norm(Part::kMlpNorm, layer + "ln_2", true));
  append(spec.tensors, linear(Part::kUp, layer + "mlp.c_fc", "D F", true, true));
  append(spec.tensors, linear(Part::kDown, layer + "mlp.c_proj", "F D", true, true));
  append(spec.tensors, norm(Part::kFinalNorm, "transformer.ln_f", true));
  spec.tensors.push_back({Part::kHead, "lm_head.weight", "V D"});
  spec.ignored = {layer + "attn.bias", layer + "attn.masked_bias"};
  spec.modules = families::modules_of(spec.tensors);
  spec.gguf = families::plain_gguf("gpt2", "GPT2LMHeadModel");
  spec.gguf.not_in_config = {"num_key_value_heads", "head_dim"};
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) {
    config["n_positions"] = r.dimension("position_embd.weight", 0).value_or(r.positions);
  };
  spec.debug = {families::tiny(spec, "plain")};
  return spec;
}

}  // namespace emend::models
