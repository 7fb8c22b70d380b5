// Gemma 2: norms before and after attention and MLP, soft-capped scores and logits, a window on every other layer.
#include <emend/models/families/common.h>

#include <cmath>

namespace emend::models {

FamilySpec gemma2_family() {
  FamilySpec spec = families::gemma_relative("gemma2", true);
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    families::read_gemma(reader, config);
    config.attention_scale = 1 / std::sqrt(reader.number_or({"query_pre_attn_scalar"}, 256));
    config.attention_softcap =
        reader.is_null("attn_logit_softcapping") ? 0 : reader.number_or({"attn_logit_softcapping"}, 50);
    config.logit_softcap =
        reader.is_null("final_logit_softcapping") ? 0 : reader.number_or({"final_logit_softcapping"}, 30);
    const int64_t window = reader.is_null("sliding_window") ? 0 : reader.integer_or({"sliding_window"}, 4096);
    families::read_windows(reader, config, window, [](int64_t layer) { return layer % 2 == 0; });
  };
  spec.gguf = families::plain_gguf("gemma2", "Gemma2ForCausalLM");
  spec.gguf.window_period = 2;
  spec.gguf.layers_of_largest = 46;
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) {
    families::read_gemma_gguf_scale(r, 46, config);
    config["attn_logit_softcapping"] = r.number("attn_logit_softcapping").value_or(50.0);
    config["final_logit_softcapping"] = r.number("final_logit_softcapping").value_or(30.0);
    config["sliding_window"] = r.window() > 0 ? r.window() : 4096;
    if (r.window() > 0) config["layer_types"] = r.layer_types(2);
  };
  spec.debug = {families::tiny(spec, "plain", R"({"num_key_value_heads": 2, "head_dim": 12, "query_pre_attn_scalar": 20,
                      "sliding_window": 4, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0})")};
  return spec;
}

}  // namespace emend::models
