// Qwen2 and Qwen2.5: Llama with biases on q, k and v; a window on the upper layers if use_sliding_window says so.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec qwen2_family() {
  FamilySpec spec = families::llama_relative("qwen2");
  spec.block.qkv_bias = true;
  spec.refine = families::read_qwen_windows;
  spec.gguf = families::plain_gguf("qwen2", "Qwen2ForCausalLM");
  spec.gguf.read = families::read_qwen_gguf_windows;
  spec.debug = {families::tiny(spec, "plain", R"({"num_key_value_heads": 2, "rope_theta": 1000000.0,
                      "tie_word_embeddings": true})"),
                families::tiny(spec, "window", R"({"hidden_size": 24, "num_attention_heads": 3,
                      "num_key_value_heads": 1, "intermediate_size": 40, "vocab_size": 90, "max_window_layers": 1,
                      "use_sliding_window": true, "sliding_window": 3})")};
  return spec;
}

}  // namespace emend::models
