// OPT: learned positions counted by the mask with an offset of 2, relu, biases; the 350m variant has its norms after
// the residual sums and an embedding narrower than the hidden size.
#include <emend/models/families/common.h>

namespace emend::models {

static void refine_opt(const ConfigReader& reader, ModelConfig& config) {
  if (!reader.flag_or({"layer_norm_elementwise_affine"}, true))
    reader.unsupported("layer_norm_elementwise_affine", "false", "true, as in the published OPT models",
                       "norms without weights are not known");
  const bool norm_first = reader.flag_or({"do_layer_norm_before"}, true);
  config.norm_order = norm_first ? NormOrder::kPre : NormOrder::kPost;
  config.final_norm = norm_first && !reader.flag_or({"_remove_final_layer_norm"}, false);
  config.embedding_width = reader.integer_or({"word_embed_proj_dim"}, config.hidden_size);
  config.qkv_bias = config.out_bias = config.mlp_bias = reader.flag_or({"enable_bias"}, true);
}

FamilySpec opt_family() {
  using families::append, families::linear, families::norm;
  FamilySpec spec = families::named("opt", "model.");
  spec.keys.kv_heads = {};
  spec.keys.mlp_width = {"ffn_dim"};
  spec.keys.norm_eps = {};
  spec.keys.default_norm_eps = 1e-5;
  spec.keys.activation = {"activation_function"};
  spec.keys.default_activation = "relu";
  spec.keys.default_tied = true;
  spec.block.norm = Norm::kLayer;
  spec.block.positions = Positions::kLearned;
  spec.block.position_rule = PositionRule::kFromMask;
  spec.block.position_offset = 2;
  spec.block.mlp = Mlp::kPlain;
  spec.refine = refine_opt;
  const auto projected = [](const ModelConfig& c) { return c.embedding_width != c.hidden_size; };
  const std::string layer = "model.decoder.layers.{layer}.";
  spec.tensors = {{Part::kEmbedding, "model.decoder.embed_tokens.weight", "V E"},
                  {Part::kPositions, "model.decoder.embed_positions.weight", "P D"},
                  {Part::kProjectIn, "model.decoder.project_in.weight", "D E", projected},
                  {Part::kProjectOut, "model.decoder.project_out.weight", "E D", projected}};
  append(spec.tensors, norm(Part::kAttnNorm, layer + "self_attn_layer_norm", true));
  append(spec.tensors,
         families::attention(layer + "self_attn.", "out_proj", &ModelConfig::qkv_bias, &ModelConfig::out_bias));
  append(spec.tensors, norm(Part::kMlpNorm, layer + "final_layer_norm", true));
  append(spec.tensors, linear(Part::kUp, layer + "fc1", "F D", &ModelConfig::mlp_bias));
  append(spec.tensors, linear(Part::kDown, layer + "fc2", "D F", &ModelConfig::mlp_bias));
  append(spec.tensors, norm(Part::kFinalNorm, "model.decoder.final_layer_norm", true, &ModelConfig::final_norm));
  spec.tensors.push_back({Part::kHead, "lm_head.weight", "V E"});
  spec.modules = families::modules_of(spec.tensors);
  spec.debug = {families::tiny(spec, "pre_norm", R"({"ffn_dim": 64})"),
                families::tiny(spec, "post_norm", R"({"num_hidden_layers": 2, "ffn_dim": 48, "vocab_size": 90,
                      "word_embed_proj_dim": 16, "do_layer_norm_before": false})")};
  return spec;
}

}  // namespace emend::models
