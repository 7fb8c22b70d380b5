// Baichuan 7B (rotary) and 13B (ALiBi): Llama with q, k, v in one W_pack; version 2 normalises the rows of its head.
#include <emend/models/families/common.h>

namespace emend::models {

// The sizes share one model_type. The class name BaiChuan… is 7B version 1; Baichuan… is 2-7B, which like all rotary
// ones states max_position_embeddings, or 13B, which states model_max_length alone.
static void refine_baichuan(const ConfigReader& reader, ModelConfig& config) {
  const auto classes = reader.texts({"architectures"});
  const bool first_7b = !classes.empty() && classes.front().starts_with("BaiChuan");
  const bool rotary = first_7b || config.hidden_size == 4096 || reader.has("max_position_embeddings");
  if (!rotary) config.positions = Positions::kAlibi;
  config.normalised_head = !first_7b && (config.vocab_size == 125696 || reader.has("z_loss_weight"));
}

// 13B has 40 layers, version 2 a larger vocabulary: so llama.cpp tells them apart.
static void read_baichuan_gguf(const GgufConfigReader& r, nlohmann::json& config) {
  if (r.layers == 40) {
    config.erase("max_position_embeddings");
    config["model_max_length"] = r.positions;
  } else {
    r.put_rotary(config);
  }
  if (r.layers == 40 || r.vocab == 125696) config["architectures"] = {"BaichuanForCausalLM"};
}

FamilySpec baichuan_family() {
  FamilySpec spec = families::llama_relative("baichuan");
  spec.keys.kv_heads = {};
  spec.keys.max_positions = {"max_position_embeddings", "model_max_length"};
  spec.block.qkv = Qkv::kBlocks;
  spec.refine = refine_baichuan;
  families::fuse(spec.tensors, {Part::kQ, Part::kK, Part::kV},
                 {Part::kQkv, "model.layers.{layer}.self_attn.W_pack.weight", "3Q D"});
  spec.gguf = families::plain_gguf("baichuan", "BaiChuanForCausalLM");
  spec.gguf.paired_rotary_rows = spec.gguf.splits_qkv = true;
  spec.gguf.not_in_config = {"head_dim"};
  spec.gguf.read = read_baichuan_gguf;
  spec.gguf.own_rotary = true;  // or none
  spec.gguf.write = [](const ModelConfig& c, GgufConfig& out) {
    out.text("tensor_data_layout", "Meta AI original pth");
    if (c.n_layers != (c.positions == Positions::kAlibi ? 40 : 32))
      out.note("llama.cpp knows this architecture's positions only for 32 layers (rotary) and 40 layers (ALiBi)");
  };
  const std::string sizes =
      R"("model_type": "baichuan", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
                              "num_attention_heads": 6, "vocab_size": 90)";
  spec.debug = {
      {"rotary", "{" + sizes + R"(, "architectures": ["BaiChuanForCausalLM"], "max_position_embeddings": 64})"},
      {"alibi", "{" + sizes + R"(, "architectures": ["BaichuanForCausalLM"], "model_max_length": 64})"},
      {"version2", "{" + sizes + R"(, "architectures": ["BaichuanForCausalLM"], "max_position_embeddings": 64,
                                             "z_loss_weight": 0})"}};
  return spec;
}

}  // namespace emend::models
