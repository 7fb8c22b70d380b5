// Gemma 3 (text): Gemma 2 with norms on query and key heads instead of soft caps, and another rotary base in windows.
#include <emend/models/detail/rotary.h>
#include <emend/models/families/common.h>

#include <cmath>

namespace emend::models {

// transformers 5 keeps one rotary object a layer type; version 4 kept the global one as usual and the local base apart.
static void read_two_rotaries(const ConfigReader& reader, const ConfigKeys& keys, ModelConfig& config) {
  const ConfigReader nested = reader.object({"rope_parameters"});
  Rotary global, local;
  if (nested.has("full_attention") || nested.has("sliding_attention")) {
    global = detail::read_rotary(reader, nested.object({"full_attention"}), keys, config);
    ConfigKeys local_keys = keys;
    local_keys.theta = {"rope_local_base_freq"};
    local_keys.default_theta = 10000;
    local = detail::read_rotary(reader, nested.object({"sliding_attention"}), local_keys, config);
  } else {
    global = detail::read_rotary(reader, reader.object({"rope_scaling"}), keys, config);
    local = global;
    local.kind = Rotary::Kind::kDefault;
    local.factor = 1;
    local.theta = reader.number_or({"rope_local_base_freq"}, 10000);
  }
  config.rotaries = {global, local};
  for (int64_t l = 0; l < config.n_layers; ++l) config.rotary_of_layer[l] = config.windows[l] > 0 ? 1 : 0;
}

FamilySpec gemma3_family() {
  FamilySpec spec = families::gemma_relative("gemma3", true);
  spec.model_types = {"gemma3_text", "gemma3"};
  spec.keys.default_theta = 1e6;
  spec.block.qk_norm = true;
  families::append(spec.tensors, families::head_norms("model.layers.{layer}.self_attn."));
  spec.ignored = {"*.rotary_emb.inv_freq", "vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*",
                  "model.multi_modal_projector.*"};
  spec.refine = [keys = spec.keys](const ConfigReader& reader, ModelConfig& config) {
    families::read_gemma(reader, config);
    config.attention_scale = 1 / std::sqrt(reader.number_or({"query_pre_attn_scalar"}, 256));
    if (reader.flag_or({"use_bidirectional_attention"}, false))
      reader.unsupported("use_bidirectional_attention", "true", "false",
                         "an embedding model reads texts in both directions: it does not write, and is not edited");
    config.logit_softcap = reader.number_or({"final_logit_softcapping"}, 0);
    const int64_t window = reader.integer_or({"sliding_window"}, 4096);
    const int64_t pattern = reader.integer_or({"sliding_window_pattern", "_sliding_window_pattern"}, 6);
    families::read_windows(reader, config, window, [&](int64_t layer) { return (layer + 1) % pattern != 0; });
    read_two_rotaries(reader, keys, config);
  };
  spec.nested_defaults = R"({"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                             "max_position_embeddings": 131072})";
  spec.gguf = families::plain_gguf("gemma3", "Gemma3ForCausalLM");
  spec.gguf.window_period = 6;
  spec.gguf.layers_of_largest = 62;
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) {
    families::read_gemma_gguf_scale(r, 62, config);
    config["attn_logit_softcapping"] = config["final_logit_softcapping"] = nullptr;
    if (const double cap = r.number("final_logit_softcapping").value_or(0); cap > 0)
      config["final_logit_softcapping"] = cap;
    config["sliding_window"] = r.window() > 0 ? r.window() : r.positions;
    config["layer_types"] = r.layer_types(6);
    config["rope_local_base_freq"] = r.number("rope.freq_base_swa").value_or(10000.0);
  };
  spec.debug = {families::tiny(spec, "plain", R"({"hidden_size": 24, "num_hidden_layers": 4, "num_key_value_heads": 2,
                      "head_dim": 8, "intermediate_size": 40, "query_pre_attn_scalar": 10, "sliding_window": 4,
                      "sliding_window_pattern": 3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})")};
  return spec;
}

}  // namespace emend::models
