// Qwen2 and Qwen2.5: Llama with biases on q, k and v; a window on the upper layers if use_sliding_window says so.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec qwen2_family() {
  FamilySpec spec = families::llama_relative("qwen2");
  spec.block.qkv_bias = true;
  spec.refine = families::read_qwen_windows;
  spec.gguf = families::plain_gguf("qwen2", "Qwen2ForCausalLM");
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) {
    families::read_qwen_gguf_windows(r, config);
    r.put_rotary(config);
  };
  spec.debug = {
      {"plain", R"({"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                              "num_key_value_heads": 2, "intermediate_size": 56, "vocab_size": 101, "rope_theta": 1000000.0,
                              "max_position_embeddings": 64, "tie_word_embeddings": true})"},
      {"window", R"({"model_type": "qwen2", "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3,
                               "num_key_value_heads": 1, "intermediate_size": 40, "vocab_size": 90, "max_window_layers": 1,
                               "use_sliding_window": true, "sliding_window": 3, "max_position_embeddings": 64})"}};
  return spec;
}

}  // namespace emend::models
