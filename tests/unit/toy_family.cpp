// Toy: a parallel block under one RMS norm, ALiBi, q, k and v in one matrix, a plain MLP with relu.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec toy_family() {
  using families::append, families::linear, families::norm;
  FamilySpec spec;
  spec.name = "toy";
  spec.model_types = {"toy"};
  spec.base_prefix = "model.";

  // Keys of config.json that differ from the usual ones.
  spec.keys.mlp_width = {"ffn_size"};
  spec.keys.mlp_width_factor = 4;  // null or absent: 4 * hidden_size
  spec.keys.default_activation = "relu";
  spec.keys.default_tied = true;

  // What the block is made of.
  spec.block.residual = Residual::kParallel;
  spec.block.mlp_norm = false;  // the MLP reads what attention reads
  spec.block.positions = Positions::kAlibi;
  spec.block.qkv = Qkv::kPerGroup;
  spec.block.mlp = Mlp::kPlain;

  // What only some models of the family have.
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    config.mlp_bias = reader.flag_or({"use_bias"}, false);
    if (reader.flag_or({"use_memory"}, false))
      reader.unsupported("use_memory", "true", "false", "the memory variant is not known");
  };

  // Names and shapes, as the file has them. The rewritten matrix is the part kDown.
  const std::string layer = "model.blocks.{layer}.";
  spec.tensors = {{Part::kEmbedding, "model.embed.weight", "V D"}};
  append(spec.tensors, norm(Part::kAttnNorm, layer + "norm", false));
  append(spec.tensors, linear(Part::kQkv, layer + "attn.qkv", "Q+2K D", false));
  append(spec.tensors, linear(Part::kAttnOut, layer + "attn.out", "D Q", false));
  append(spec.tensors, linear(Part::kUp, layer + "mlp.up", "F D", &ModelConfig::mlp_bias));
  append(spec.tensors, linear(Part::kDown, layer + "mlp.down", "D F", &ModelConfig::mlp_bias));
  append(spec.tensors, norm(Part::kFinalNorm, "model.norm", false));
  spec.tensors.push_back({Part::kHead, "lm_head.weight", "V D"});
  spec.ignored = {layer + "attn.mask"};

  // Modules, as hyper-parameter files and device maps name them.
  spec.modules = {"model.blocks.{}",     "model.blocks.{}.attn",
                  "model.blocks.{}.mlp", "model.blocks.{}.mlp.down",
                  "model.norm",          "lm_head",
                  "model.embed",         ""};

  // GGUF: the sizes come from the keys above, the row order from the block; here is what llama.cpp would call it, and
  // what its metadata and tensors say beyond that. Without an architecture the family has no GGUF form.
  spec.gguf.architecture = "toy";
  spec.gguf.class_name = "ToyForCausalLM";
  spec.gguf.not_in_config = {"head_dim"};
  spec.gguf.tensor_name = [](const ModelConfig&, Part part) { return part == Part::kAttnNorm ? "block_norm" : ""; };
  spec.gguf.pre = {{"toy-bpe", {{"type", "WhitespaceSplit"}}}};
  spec.gguf.read = [](const GgufConfigReader& reader, nlohmann::json& config) {
    config["use_bias"] = reader.has("blk.0.ffn_up.bias");
    config["use_memory"] = reader.flag("use_memory").value_or(false);
  };
  spec.gguf.write = [](const ModelConfig&, GgufConfig& out) { out.note("llama.cpp does not know this family"); };

  // A tiny model for the tests that loop over all families.
  spec.debug = {{"plain", R"({"model_type": "toy", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                              "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64,
                              "use_bias": true})"}};
  return spec;
}

}  // namespace emend::models
