// Mistral 7B and its successors: Llama with an optional sliding window on all layers.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec mistral_family() {
  FamilySpec spec = families::llama_relative("mistral");
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    // null turns the window off (v0.2 and later); the library that wrote the files takes 4096 where the key is absent.
    const int64_t window = reader.is_null("sliding_window") ? 0 : reader.integer_or({"sliding_window"}, 4096);
    families::read_windows(reader, config, window, [](int64_t) { return true; });
  };
  spec.gguf = families::llama_gguf("MistralForCausalLM");
  spec.gguf.claims = [](const GgufConfigReader& r) {
    return r.integer("expert_count").value_or(0) <= 0 && r.window() > 0;
  };
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) { config["sliding_window"] = r.window(); };
  spec.debug = {families::tiny(spec, "window", R"({"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 4})")};
  return spec;
}

}  // namespace emend::models
