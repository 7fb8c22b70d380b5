// Phi-3, Phi-3.5 and Phi-4: fused qkv_proj and gate_up_proj, a window on all layers where set, longrope.
#include <emend/models/families/common.h>

#include <algorithm>

namespace emend::models {

FamilySpec phi3_family() {
  FamilySpec spec = families::llama_relative("phi3");
  spec.keys.default_norm_eps = 1e-5;
  spec.keys.yarn_means_longrope = true;
  spec.block.qkv = Qkv::kBlocks;
  spec.block.mlp = Mlp::kGatedFused;
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    families::read_windows(reader, config, reader.integer_or({"sliding_window"}, 0), [](int64_t) { return true; });
  };
  const std::string layer = "model.layers.{layer}.";
  families::fuse(spec.tensors, {Part::kQ, Part::kK, Part::kV},
                 {Part::kQkv, layer + "self_attn.qkv_proj.weight", "Q+2K D"});
  families::fuse(spec.tensors, {Part::kGate, Part::kUp}, {Part::kGateUp, layer + "mlp.gate_up_proj.weight", "2F D"});
  spec.gguf = families::plain_gguf("phi3", "Phi3ForCausalLM");
  spec.gguf.not_in_config = {"head_dim"};
  spec.gguf.longrope_by_table = true;
  spec.gguf.name_words = {"phi-3", "Phi-3"};  // its special tokens take the white space behind them
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) {
    config["partial_rotary_factor"] = r.rotary_fraction();
    config["sliding_window"] = nullptr;
    if (r.window() > 0) config["sliding_window"] = r.window();
    config["original_max_position_embeddings"] =
        r.integer("rope.scaling.original_context_length").value_or(r.positions);
  };
  spec.gguf.write = [](const ModelConfig& c, GgufConfig& out) {  // llama.cpp wants the key, also where it is 0
    out.integer("attention.sliding_window", c.windows.empty() ? 0 : *std::ranges::max_element(c.windows));
  };
  spec.debug = {families::tiny(spec, "window", R"({"num_key_value_heads": 2, "sliding_window": 5})"),
                families::tiny(spec, "longrope", R"({"num_hidden_layers": 2, "num_key_value_heads": 2,
                      "intermediate_size": 40, "vocab_size": 90, "max_position_embeddings": 128,
                      "original_max_position_embeddings": 8, "rope_scaling": {"type": "longrope", "short_factor": [1.0,
                      1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 4.0, 6.0]}})")};
  return spec;
}

}  // namespace emend::models
