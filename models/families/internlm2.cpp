// InternLM2: one wqkv whose rows are grouped by key-value head, and names of its own.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec internlm2_family() {
  using families::append, families::linear, families::norm;
  FamilySpec spec = families::llama_relative("internlm2");
  spec.keys.default_norm_eps = 1e-5;
  spec.block.qkv = Qkv::kPerGroup;
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    config.qkv_bias = config.out_bias = reader.flag_or({"bias"}, false);
  };
  const std::string layer = "model.layers.{layer}.";
  spec.tensors = {{Part::kEmbedding, "model.tok_embeddings.weight", "V D"}};
  append(spec.tensors, norm(Part::kAttnNorm, layer + "attention_norm", false));
  append(spec.tensors, linear(Part::kQkv, layer + "attention.wqkv", "Q+2K D", &ModelConfig::qkv_bias));
  append(spec.tensors, linear(Part::kAttnOut, layer + "attention.wo", "D Q", &ModelConfig::out_bias));
  append(spec.tensors, norm(Part::kMlpNorm, layer + "ffn_norm", false));
  append(spec.tensors, linear(Part::kGate, layer + "feed_forward.w1", "F D", false));
  append(spec.tensors, linear(Part::kUp, layer + "feed_forward.w3", "F D", false));
  append(spec.tensors, linear(Part::kDown, layer + "feed_forward.w2", "D F", false));
  append(spec.tensors, norm(Part::kFinalNorm, "model.norm", false));
  spec.tensors.push_back({Part::kHead, "output.weight", "V D"});
  spec.modules = families::modules_of(spec.tensors);
  spec.gguf = families::plain_gguf("internlm2", "InternLM2ForCausalLM");
  spec.gguf.paired_rotary_rows = spec.gguf.splits_qkv = true;
  spec.gguf.not_in_config = {"head_dim"};
  spec.gguf.read = [](const GgufConfigReader&, nlohmann::json& config) { config["bias"] = false; };
  spec.debug = {families::tiny(spec, "dynamic", R"({"num_key_value_heads": 2, "rope_theta": 1000000,
                      "max_position_embeddings": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0}})")};
  return spec;
}

}  // namespace emend::models
